// Mynah's player: PCM16 comes in while it is made, sound goes out without holes. Knows nothing of Gradio.
//
// `begin()` in the click, `take(message)` for each message, `stop()`; what was made can be paused and sought in while
// the rest is being made. `probe()` tells tests what happens.
// Lengths are samples at 24 kHz, times are seconds. The player decides when its sink (sinks.js) opens.
(() => {
  const RATE = 24000;
  const START = 0.12; // buffered before the first sample is played
  const REBUFFER = 0.3; // more of it after each underrun, up to LONGEST
  const LONGEST = 1.5;
  const PATIENCE = 3; // longest wait for a lead over a slow engine, at the start and after each underrun
  const FAST_ENOUGH = 0.9; // seconds of work per second of sound up to which no lead is needed, a tenth to spare
  const clock = () => performance.now() / 1000;

  class Player {
    constructor() {
      Object.assign(this, {context: null, sink: null, ready: Promise.resolve(), run: 0, log: [], onchange: () => {}});
      this.volume = 1;
      this.#reset("idle");
      for (const gesture of ["pointerdown", "keydown"])
        addEventListener(gesture, () => this.warm(), {capture: true, passive: true});
    }

    #reset(state) {
      Object.assign(this, {state, job: 0, received: 0, played: 0, peaks: [], underruns: 0, lost: 0, next: 0});
      Object.assign(this, {target: START, pace: null, expected: 0, waitsSince: 0, complete: false, final: null});
      Object.assign(this, {figures: {}, open: false});
      Object.assign(this, {message: "", clickedAt: 0, queueWait: null, heard: null, blocked: false});
      Object.assign(this, {sound: [], base: 0, paused: false, halted: false, progress: null, timeline: []});
    }

    // Browsers let a context run only after a gesture, and the first one takes a while: any key or pointer warms it.
    warm() {
      if (!this.context) {
        this.context = new AudioContext({sampleRate: RATE, latencyHint: "interactive"});
        this.analyser = new AnalyserNode(this.context, {fftSize: 2048});
        this.analyser.connect(this.context.destination);
        this.gain = new GainNode(this.context, {gain: this.volume});
        this.gain.connect(this.analyser);
        this.context.onstatechange = () => this.#change({blocked: this.blocked && this.context.state !== "running"});
        const report = (played) => this.#heard(played);
        this.ready = mynahSink(this.context, this.gain, report).then((sink) => {
          this.sink = sink;
          sink.reset(this.run);
        });
      }
      if (this.context.state !== "running") this.context.resume().catch(() => {});
    }

    begin() {
      this.warm();
      this.#reset("waiting");
      this.job = Date.now();
      this.clickedAt = clock();
      this.sink?.reset(++this.run);
      this.#note("begin");
      setTimeout(() => this.#change({blocked: this.context.state !== "running"}), 500);
      return this.job;
    }

    // Ends the job, or what plays again of a job that has ended.
    stop() {
      this.sink?.reset(++this.run);
      if (!this.job) return 0;
      Object.assign(this, {base: this.played, halted: true, complete: true, progress: null});
      this.#change({state: this.final?.state ?? "stopped", open: false, paused: false}, "stop");
      return this.job;
    }

    fail(message) {
      if (["failed", "asked"].includes(this.final?.state)) return;
      this.#change({state: "failed", message, complete: true, progress: null}, "failed");
    }

    get playing() { return ["buffering", "speaking"].includes(this.state); }

    // Play and pause. At the end it begins again.
    toggle() {
      if (!this.received) return;
      if (!this.playing) this.seek(this.played >= this.received && this.complete ? 0 : this.played);
      else {
        this.sink.reset(++this.run);
        this.#change({base: this.played, open: false, paused: true, state: "paused"}, "pause");
      }
    }

    // Plays from this sample on, in what has been made so far.
    seek(sample) {
      if (!this.received) return;
      this.warm();
      this.sink.reset(++this.run);
      const from = Math.max(0, Math.min(this.received, Math.round(sample)));
      Object.assign(this, {base: from, played: from, open: false, paused: false, state: "speaking"});
      let at = 0;
      for (const samples of this.sound) {
        if (at + samples.length > from) this.sink.push(samples.slice(Math.max(0, from - at)));
        at += samples.length;
      }
      this.#note("seek");
      this.#advance();
    }

    setVolume(volume) {
      this.volume = volume;
      this.gain?.gain.setTargetAtTime(volume, this.context.currentTime, 0.01);
      this.#change({});
    }

    take(message) {
      if (!message || message.job !== this.job) return; // of an earlier click
      this.ready = this.ready.then(() => this.#take(message)).catch((error) => this.fail(String(error)));
    }

    #take(message) {
      if (message.figures) this.figures = message.figures;
      if (!this.halted) (message.earlier ?? []).forEach((chunk) => this.#receive(chunk)); // some may not have been shown
      if (message.state === "preparing") {
        this.queueWait = clock() - this.clickedAt;
        if (this.state === "waiting") this.#change({state: "preparing"}, "preparing");
      } else if (message.pcm !== undefined && !this.halted) {
        this.#receive(message);
      } else if (message.pcm === undefined && !this.final) {
        Object.assign(this, {final: message, complete: true, message: message.message, progress: null});
        if (message.state !== "done" && !(this.halted && this.playing)) this.state = message.state;
        this.#note(message.state);
        this.#advance();
      }
    }

    #receive({index, pcm, rate, last, pace, expected, progress = this.progress}) {
      if (index < this.next) return; // Gradio may show a value twice
      if (rate !== RATE) throw new Error(`the engine sends ${rate} Hz, the player plays ${RATE} Hz`);
      const bytes = new DataView(Uint8Array.from(atob(pcm), (letter) => letter.charCodeAt(0)).buffer);
      const samples = new Float32Array(bytes.byteLength / 2);
      for (let i = 0; i < samples.length; i++) samples[i] = bytes.getInt16(2 * i, true) / 32767;
      for (let i = 0; i < samples.length; i += 960)
        this.peaks.push(samples.subarray(i, i + 960).reduce((peak, x) => Math.max(peak, Math.abs(x)), 0));
      this.lost += index - this.next;
      if (!this.received) {
        this.#waitForLead();
        this.#note("first chunk");
      }
      this.received += samples.length;
      Object.assign(this, {next: index + 1, pace, expected, complete: last});
      this.progress = last ? null : progress;
      this.sound.push(samples);
      if (!this.paused) this.sink.push(samples);
      this.#mark();
      this.#advance();
    }

    #waitForLead() {
      this.waitsSince = clock();
      setTimeout(() => this.#advance(), 1000 * PATIENCE);
    }

    // Seconds to have in hand before the sink opens. `pace` is seconds of work per second of sound, null while nobody
    // knows it: then it plays at once. An engine slower than sound needs a lead that lasts to the expected end.
    #needed() {
      if (!(this.pace > FAST_ENOUGH) || clock() - this.waitsSince >= PATIENCE) return this.target;
      return Math.max(this.target, (this.expected - this.played / RATE) * (1 - FAST_ENOUGH / this.pace));
    }

    #advance() {
      const waiting = this.received - this.played;
      const mayPlay = !this.paused && (!this.halted || this.playing);
      if (!this.open && waiting && mayPlay && (this.complete || waiting / RATE >= this.#needed())) {
        this.open = true;
        this.sink.open();
        this.#note("play");
      }
      if (["waiting", "preparing", "buffering", "speaking"].includes(this.state)) {
        if (this.final && !waiting) this.#note("end");
        const ended = !waiting && (this.final?.state ?? (this.halted ? "stopped" : null));
        this.state = ended || (this.open ? "speaking" : waiting ? "buffering" : this.state);
      }
      this.#change({});
    }

    #heard({run, played, first, dry}) {
      if (run !== this.run) return;
      this.played = this.base + played;
      if (this.state !== "stopped") this.#mark();
      if (this.heard === null && first !== null && this.context.currentTime >= first) {
        const latency = this.context.outputLatency || this.context.baseLatency || 0;
        this.heard = clock() - (this.context.currentTime - first) + latency - this.clickedAt;
        this.#note("heard");
      }
      if (dry) {
        this.open = false;
        if (!this.complete) {
          this.underruns++;
          this.target = Math.min(LONGEST, REBUFFER * this.underruns);
          this.state = "buffering";
          this.#waitForLead();
          this.#note("underrun");
        }
      }
      this.#advance();
    }

    // How much was made and heard, by the time since the click; at most ten times a second and 3000 times in all.
    #mark() {
      const at = clock() - this.clickedAt;
      const late = this.timeline.at(-1);
      if (this.complete && this.played >= this.received && late?.played >= this.received) return;
      if (late && at - late.at < 0.1 && late.made === this.received) return;
      if (this.timeline.length < 3000) this.timeline.push({at, made: this.received, played: this.played});
    }

    #change(fields, event) {
      Object.assign(this, fields);
      if (event) this.#note(event);
      this.onchange();
    }

    #note(event) {
      this.log.push({at: Date.now(), event, received: this.received, played: this.played});
      if (this.log.length > 200) this.log.shift();
    }

    probe() {
      const wave = new Float32Array(this.analyser?.fftSize ?? 0);
      this.analyser?.getFloatTimeDomainData(wave);
      const {state, received, played, underruns, lost, target, queueWait, heard, blocked, message, progress} = this;
      return {
        state, received, played, underruns, lost, target, queueWait, heard, blocked, message, progress,
        context: this.context?.state ?? "none",
        currentTime: this.context?.currentTime ?? 0,
        rms: Math.sqrt(wave.reduce((sum, x) => sum + x * x, 0) / (wave.length || 1)),
        sink: this.sink?.name ?? "none",
        log: [...this.log],
      };
    }
  }

  window.mynahPlayer = new Player();
})();
