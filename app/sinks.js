// Where samples become sound: an AudioWorklet, or scheduled buffers on pages without a secure origin.
//
// A sink plays what was pushed while it is open and closes by itself when it runs dry. It reports
// {run, played, first, dry}: samples played since `reset(run)`, the context's time of the first one, and whether it has
// just run dry.
(() => {
  const RATE = 24000;

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

  window.mynahSink = async (context, output, report) =>
    context.audioWorklet ? WorkletSink.create(context, output, report) : new ScheduledSink(context, output, report);
})();
