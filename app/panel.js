// Shows the player: state, progress, controls and figures, inside the markup of panel.html.
window.mynahPanel = (element, player) => {
  const RATE = 24000;
  const WORDS = {
    idle: "Ready", waiting: "Waiting for a free place", preparing: "Preparing the voice", buffering: "Buffering",
    speaking: "Speaking", paused: "Paused", done: "Done", stopped: "Stopped", failed: "Failed", asked: "One question",
  };
  const HINTS = {
    waiting: "It starts by itself; Stop leaves the line.",
    preparing: "The first time with a voice takes a moment longer.",
    buffering: "The engine is slower than the sound; it goes on by itself.",
    stopped: "What was made is kept: play it here, or save it below.",
    failed: "Nothing else is lost: change what is named here and press Speak again.",
    asked: "Correct it, or press Speak again to go on as it is.",
  };
  // The place in line, from the status that Gradio keeps over the panel.
  const around = element.closest("#player") ?? element;
  const place = () => {
    const [, first, last] = /(\d+)\s*\/\s*(\d+)/.exec(around.querySelector(".progress-text")?.textContent ?? "") ?? [];
    return first ? `: place ${first} of ${last}` : "";
  };
  const find = (name) => element.querySelector(`[data-mynah=${name}]`);
  const seconds = (value, digits = 2) => (value == null ? "–" : `${value.toFixed(digits)} s`);
  const [card, canvas, seek, play, progress] = ["card", "wave", "seek", "play", "progress"].map(find);

  find("listen").onclick = () => player.warm();
  play.onclick = () => player.toggle();
  seek.oninput = () => player.seek(seek.value * RATE);
  canvas.onclick = ({offsetX}) => player.seek(mynahWave.sampleAt(canvas, player, offsetX));
  find("volume").oninput = ({target}) => player.setVolume(Number(target.value));
  find("reuse").onclick = () => {
    const field = document.querySelector("#seed textarea, #seed input");
    field.value = player.figures.seed;
    field.dispatchEvent(new Event("input", {bubbles: true}));
  };

  const texts = () => {
    const {figures, state, received, played, progress} = player;
    return {
      state: WORDS[state] + (state === "waiting" ? place() : ""),
      hint: player.received || state !== "stopped" ? HINTS[state] ?? "" : "",
      clock: received ? `${(played / RATE).toFixed(1)} / ${(received / RATE).toFixed(1)} s` : "",
      message: player.message,
      sentences: progress ? `Sentence ${progress.sentence} of ${progress.sentences}` : "",
      left: progress?.left == null ? "" : `about ${Math.ceil(progress.left)} s left`,
      play: player.playing && received ? "Pause" : "Play",
      wait: seconds(player.queueWait),
      engine: seconds(figures.first_audio),
      heard: seconds(player.heard),
      latency: player.context?.outputLatency ? `${Math.round(1000 * player.context.outputLatency)} ms` : "–",
      rtf: (figures.rtf ?? player.pace)?.toFixed(2) ?? "–",
      sound: seconds(figures.seconds),
      tokens: figures.tokens ?? "–",
      underruns: received ? player.underruns + player.lost : "–",
      seed: figures.seed ?? "–",
      mode: figures.mode ?? "–",
      ahead: player.playing ? `${((received - played) / RATE).toFixed(1)} s ahead` : "",
    };
  };

  let due = false;
  let drawnAt = 0;
  const show = () => {
    due = false;
    for (const [name, text] of Object.entries(texts())) mynahSay(find(name), String(text));
    card.dataset.state = player.state;
    find("listen").hidden = !player.blocked;
    find("reuse").hidden = player.figures.seed === undefined;
    find("making").hidden = !player.progress;
    progress.value = player.progress?.fraction ?? 0;
    play.disabled = seek.disabled = !player.received;
    seek.max = player.received / RATE;
    if (document.activeElement !== seek || player.playing) seek.value = player.played / RATE;
    mynahWave.draw(canvas, player);
    if (find("more").open) mynahTimeline(find("timeline"), player);
    if (find("spectrum").open && performance.now() - drawnAt > 500) {
      mynahSpectrogram(find("spectrogram"), player);
      drawnAt = performance.now();
    }
  };
  const soon = () => {
    if (!due) requestAnimationFrame(show);
    due = true;
  };
  player.onchange = soon;
  for (const name of ["more", "spectrum"]) find(name).ontoggle = () => { drawnAt = 0; soon(); };
  new MutationObserver(() => player.state === "waiting" && soon())
    .observe(around, {childList: true, subtree: true, characterData: true});
  new ResizeObserver(soon).observe(canvas);
  new MutationObserver(soon).observe(document.body, {attributeFilter: ["class"]}); // dark mode
  show();
};
