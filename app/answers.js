// One stream carries the answers to all that a page asks. Gradio's server ends it when nothing is left to answer, and
// what the page asks while that word is on its way is answered into no stream: the page would wait until it asked
// again. So the stream goes on here, unseen by Gradio's client, as long as an answer is missing.
(() => {
  const plain = window.fetch.bind(window);
  const asking = new Set();  // what has no id yet
  const missing = new Set();  // ids whose answer has not ended
  const early = new Set();  // ids whose answer ended before they were known

  const join = async (...call) => {
    const reply = await plain(...call);
    const id = reply.ok && (await reply.clone().json()).event_id;
    if (id && !early.delete(id)) missing.add(id);
    return reply;
  };

  const ask = (...call) => {
    const joining = join(...call).finally(() => asking.delete(joining));
    asking.add(joining);
    return joining;
  };

  async function* messages(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      for (let text = ""; ;) {
        const {value, done} = await reader.read();
        if (done) return;
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        yield* parts;
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  const ended = (message) => {
    const {msg, event_id: id} = JSON.parse(message.slice("data:".length));
    if (msg === "process_completed" && !missing.delete(id)) early.add(id);
    return msg === "close_stream";
  };

  async function* answers(body, reopen) {
    for (; ; body = (await reopen()).body) {
      let last = null;
      for await (const message of messages(body)) {
        if (/"(process_completed|close_stream)"/.test(message.slice(0, 80)) && ended(message)) last = message;
        else yield message;
      }
      while (last && asking.size) await Promise.allSettled(asking);
      if (last && missing.size) continue;
      if (last) yield last;
      return;
    }
  }

  const listen = async (request, options) => {
    const open = () => plain(new Request(request), options);
    const reply = await open();
    if (!reply.ok) return reply;
    const stream = answers(reply.body, open), encoder = new TextEncoder();
    const body = new ReadableStream({
      async pull(controller) {
        const {value, done} = await stream.next();
        if (done) controller.close();
        else controller.enqueue(encoder.encode(value + "\n\n"));
      },
      cancel: () => void stream.return(),
    });
    return new Response(body, {status: reply.status, headers: reply.headers});
  };

  window.fetch = (request, options) => {
    const {pathname} = new URL(request.url ?? request, location.href);
    if (pathname.endsWith("/queue/join")) return ask(request, options);
    if (pathname.endsWith("/queue/data")) return listen(request, options);
    return plain(request, options);
  };
})();
