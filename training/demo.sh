#!/bin/bash
# The demo voice, from an empty folder to assets/demo. Every step goes on from its own state when it is run again.
#
#   TEACHER=folder TEXT=folder WORK=folder bash training/demo.sh
#
# TEACHER holds the teacher's weights and phoneme ids, TEXT train.txt and test.txt (README.md says where they come from).
# Times are those of one H200; the trainers can run side by side, for none of them fills it.
set -euo pipefail
cd "$(dirname "$0")/.."
corpus=$WORK/corpus weights=$WORK/weights
mkdir -p "$corpus" "$weights"

# Text vocabulary: 2 s on a CPU. The d-vector weights come from the package Resemblyzer.
python -m training.bpe --text "$TEXT" --out "$WORK/vocabulary"
[ -f "$WORK/dvector.safetensors" ] || python -m training.dvector "$WORK/dvector.safetensors"

# 93 h of speech by 960 speakers, and the held-out sentences and speakers: 110 s a shard, 525 times real time
# with a thread for each core; two shards side by side with the 6 threads that are the default, 245 times each.
for shard in 0 1 2 3 4 5; do
  [ -f "$corpus/corpus-$shard.safetensors" ] ||
    python -m training.data --teacher "$TEACHER" --out "$corpus" --hours 93 --shard "$shard/6"
done

# Speech tokenizer: 440 s. One token alone tells 88 % of the phonemes of unseen speakers, 67 % survive 20 dB of noise.
python -m training.train_tokenizer --corpus "$corpus" --out "$weights" --seconds 440
# Speaker encoder: 220 s. Equal error rate .7 % on unseen speakers, where the d-vectors have 2.9 %.
python -m training.train_speaker --corpus "$corpus" --out "$weights" --dvectors "$WORK/dvector.safetensors" --seconds 220
# From here on both are frozen: tokens and speaker vectors of the whole corpus, 55 s.
python -m training.encode --corpus "$corpus" --tokenizer "$weights/tokenizer.safetensors" \
  --speaker "$weights/speaker.safetensors"

# Flow: the figures of README.md came after 500 s and 22,500 steps of 1,000 s of speech each.
python -m training.train_flow --corpus "$corpus" --out "$weights" --compile --seconds 900
# Language model: 170 s, after which it learns 93 h by heart; only more speech would help.
python -m training.train_lm --corpus "$corpus" --text "$TEXT" --vocabulary "$WORK/vocabulary" --out "$weights" --seconds 180
# Vocoder: the one that is shipped had 350 s, and 1,250 s on 11 h with --compile; naturalness was still rising slowly.
python -m training.train_vocoder --corpus "$corpus" --out "$weights" --search --compile --seconds 1700
# Later both went on: the flow 680 s with a reader of phonemes beside it, the vocoder 470 s, half of its rows on mels that
# the flow made of tokens. Likeness rose by .01 and as many words were lost as before (README.md).
python -m training.train_flow --corpus "$corpus" --start "$weights/flow.safetensors" --out "$weights/later" --compile \
  --phones 0.06 --rate 2e-4 --seconds 680
python -m training.flow_mels --corpus "$corpus" --flow "$weights/flow.safetensors"
python -m training.train_vocoder --corpus "$corpus" --start "$weights/hift.safetensors" --out "$weights/later" --search \
  --compile --flow-mels 0.5 --rate 2e-4 --seconds 470
mv "$weights"/later/{flow,hift}.safetensors "$weights"

# Half precision and int8, both ONNX files, configuration: 40 s on a CPU, 48 MB.
python -m training.export --weights "$weights" --vocabulary "$WORK/vocabulary" --out assets/demo
