// Mynah's player: PCM16 comes in while it is made, sound goes out without holes. Knows nothing of Gradio.
//
// `begin()` in the click, `take(message)` for each message, `stop()`; `probe()` tells tests and the panel what happens.
// Lengths are samples at 24 kHz, times are seconds. A sink (worklet or scheduled buffers) plays while it is open and
// closes by itself when it runs dry; the player decides when it opens again.
(() => {
  const RATE = 24000;
  const START = 0.12; // buffered before the first sample is played
  const REBUFFER = 0.3; // more of it after each underrun, up to LONGEST
  const LONGEST = 1.5;
  const PATIENCE = 3; // from the first chunk on, a slow engine is not waited for longer than this
  const GROWTH = 2.2; // the engine's chunks about double: the next one may take this much longer than the last
  const clock = () => performance.now() / 1000;

  const WORKLET = `registerProcessor("mynah", class extends AudioWorkletProcessor {
    constructor() {
      super();
      this.reset(0);
      this.port.onmessage = ({data}) => {
        if (data.run !== undefined) this.reset(data.run);
        if (data.samples) this.queue.push(data.samples);
        if (data.open) this.open = true;
      };
    }
    reset(run) { Object.assign(this, {run, queue: [], offset: 0, played: 0, first: null, open: false, blocks: 0}); }
    process(_, [[out]]) {
      let filled = 0;
      while (this.open && filled < out.length && this.queue.length) {
        const part = this.queue[0].subarray(this.offset, this.offset + out.length - filled);
        out.set(part, filled);
        filled += part.length;
        this.offset += part.length;
        if (this.offset === this.queue[0].length) { this.queue.shift(); this.offset = 0; }
      }
      if (filled && this.first === null) this.first = currentTime;
      this.played += filled;
      const dry = this.open && filled < out.length;
      if (dry) this.open = false;
      if (dry || (this.open && this.blocks++ % 8 === 0))
        this.port.postMessage({run: this.run, played: this.played, first: this.first, dry});
      return true;
    }
  });`;

  class WorkletSink {
    static async create(context, output, report) {
      const url = URL.createObjectURL(new Blob([WORKLET], {type: "text/javascript"}));
      await context.audioWorklet.addModule(url);
      URL.revokeObjectURL(url);
      const sink = new WorkletSink();
      sink.name = "worklet";
      sink.node = new AudioWorkletNode(context, "mynah", {numberOfInputs: 0, outputChannelCount: [1]});
      sink.node.port.onmessage = ({data}) => report(data);
      sink.node.connect(output);
      return sink;
    }
    reset(run) { this.node.port.postMessage({run}); }
    push(samples) { this.node.port.postMessage({samples}); }
    open() { this.node.port.postMessage({open: true}); }
  }

  // For pages without a secure origin (http://192.168.x.x), where browsers have no worklet.
  class ScheduledSink {
    constructor(context, output, report) {
      Object.assign(this, {name: "scheduled", context, output, report, nodes: new Set()});
      this.reset(0);
      setInterval(() => this.tick(), 25);
    }
    reset(run) {
      for (const node of this.nodes) node.stop();
      Object.assign(this, {run, queue: [], end: 0, scheduled: 0, first: null, isOpen: false, nodes: new Set()});
    }
    push(samples) {
      this.tick();
      this.queue.push(samples);
      if (this.isOpen) this.schedule();
    }
    open() {
      this.isOpen = true;
      this.end = this.context.currentTime + 0.02;
      this.first ??= this.end;
      this.schedule();
    }
    schedule() {
      for (const samples of this.queue.splice(0)) {
        const buffer = this.context.createBuffer(1, samples.length, RATE);
        buffer.copyToChannel(samples, 0);
        const node = new AudioBufferSourceNode(this.context, {buffer});
        node.connect(this.output);
        node.onended = () => this.nodes.delete(node);
        this.nodes.add(node);
        node.start(this.end);
        this.end += samples.length / RATE;
        this.scheduled += samples.length;
      }
    }
    tick() {
      if (!this.isOpen) return;
      const ahead = Math.max(0, this.end - this.context.currentTime);
      const dry = ahead === 0;
      if (dry) this.isOpen = false;
      const played = Math.min(this.scheduled, Math.max(0, this.scheduled - Math.round(ahead * RATE)));
      this.report({run: this.run, played, first: this.first, dry});
    }
  }

  class Player {
    constructor() {
      Object.assign(this, {context: null, sink: null, ready: Promise.resolve(), run: 0, log: [], onchange: () => {}});
      this.#reset("idle");
      for (const gesture of ["pointerdown", "keydown"])
        addEventListener(gesture, () => this.warm(), {capture: true, passive: true});
    }

    #reset(state) {
      Object.assign(this, {state, job: 0, received: 0, played: 0, peaks: [], underruns: 0, lost: 0, next: 0, open: false});
      Object.assign(this, {target: START, pace: null, chunk: 0, expected: 0, complete: false, final: null, figures: {}});
      Object.assign(this, {message: "", clickedAt: 0, firstAt: 0, queueWait: null, heard: null, blocked: false});
    }

    // Browsers let a context run only after a gesture, and the first one takes a while: any key or pointer warms it.
    warm() {
      if (!this.context) {
        this.context = new AudioContext({sampleRate: RATE, latencyHint: "interactive"});
        this.analyser = new AnalyserNode(this.context, {fftSize: 2048});
        this.analyser.connect(this.context.destination);
        this.context.onstatechange = () => this.#change({blocked: this.blocked && this.context.state !== "running"});
        const report = (played) => this.#heard(played);
        this.ready = (
          this.context.audioWorklet
            ? WorkletSink.create(this.context, this.analyser, report)
            : Promise.resolve(new ScheduledSink(this.context, this.analyser, report))
        ).then((sink) => { this.sink = sink; sink.reset(this.run); });
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

    stop() {
      this.sink?.reset(++this.run);
      if (this.job && !this.final) this.#change({state: "stopped", open: false}, "stop");
      return this.job;
    }

    fail(message) {
      if (this.final?.state !== "failed") this.#change({state: "failed", message, complete: true}, "failed");
    }

    take(message) {
      if (!message || message.job !== this.job) return; // of an earlier click
      this.ready = this.ready.then(() => this.#take(message)).catch((error) => this.fail(String(error)));
    }

    #take(message) {
      if (message.figures) this.figures = message.figures;
      if (message.state === "preparing") {
        this.queueWait = clock() - this.clickedAt;
        if (this.state === "waiting") this.#change({state: "preparing"}, "preparing");
      } else if (message.pcm !== undefined && this.state !== "stopped") {
        this.#receive(message);
      } else if (message.pcm === undefined && !this.final) {
        Object.assign(this, {final: message, complete: true, message: message.message});
        if (message.state !== "done") this.state = message.state;
        this.#note(message.state);
        this.#advance();
      }
    }

    #receive({index, pcm, rate, pace, expected, last}) {
      if (index < this.next) return; // Gradio may show a value twice
      if (rate !== RATE) throw new Error(`the engine sends ${rate} Hz, the player plays ${RATE} Hz`);
      const bytes = new DataView(Uint8Array.from(atob(pcm), (letter) => letter.charCodeAt(0)).buffer);
      const samples = new Float32Array(bytes.byteLength / 2);
      for (let i = 0; i < samples.length; i++) samples[i] = bytes.getInt16(2 * i, true) / 32767;
      for (let i = 0; i < samples.length; i += 960)
        this.peaks.push(samples.subarray(i, i + 960).reduce((peak, x) => Math.max(peak, Math.abs(x)), 0));
      this.lost += index - this.next;
      if (!this.received) {
        this.firstAt = clock();
        setTimeout(() => this.#advance(), 1000 * PATIENCE);
        this.#note("first chunk");
      }
      this.received += samples.length;
      Object.assign(this, {next: index + 1, chunk: samples.length / RATE, pace, expected, complete: last});
      this.sink.push(samples);
      this.#advance();
    }

    // Seconds to have in hand before the sink opens. `pace` is seconds of work per second of sound: the next chunk must
    // arrive before these are heard, and an engine slower than sound needs a lead that lasts to the expected end.
    #needed() {
      if (this.underruns || clock() - this.firstAt >= PATIENCE) return this.target;
      return Math.max(this.target, this.pace * GROWTH * this.chunk, this.expected * (1 - 1 / this.pace));
    }

    #advance() {
      const waiting = this.received - this.played;
      if (!this.open && waiting && this.state !== "stopped" && (this.complete || waiting / RATE >= this.#needed())) {
        this.open = true;
        this.sink.open();
        this.#note("play");
      }
      if (["preparing", "buffering", "speaking"].includes(this.state)) {
        if (this.final && !waiting) this.#note("end");
        this.state = this.final && !waiting ? this.final.state : this.open ? "speaking" : waiting ? "buffering" : this.state;
      }
      this.#change({});
    }

    #heard({run, played, first, dry}) {
      if (run !== this.run) return;
      this.played = played;
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
          this.#note("underrun");
        }
      }
      this.#advance();
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
      const {state, received, played, underruns, lost, target, queueWait, heard, blocked, message} = this;
      return {
        state, received, played, underruns, lost, target, queueWait, heard, blocked, message,
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
