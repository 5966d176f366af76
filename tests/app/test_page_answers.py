"""All that a page asks is answered, also when it asks while Gradio's server ends the stream of answers."""

from collections.abc import Callable

import pytest

from tests.app.fake_engine import FakeEngine
from tests.app.site import AUDIO, Site, upload

pytestmark = pytest.mark.browser

# The word that the stream has ended takes a second to arrive, as on a busy machine or over a slow line.
LATE_CLOSE = """(() => {
  const plain = window.fetch;
  const late = () => new TransformStream({
    async transform(text, controller) {
      const closing = text.search(/data: *{"msg": *"close_stream"/);
      if (closing < 0) return controller.enqueue(text);
      controller.enqueue(text.slice(0, closing));
      window.closing = (window.closing ?? 0) + 1;
      await new Promise((wake) => setTimeout(wake, 1000));
      controller.enqueue(text.slice(closing));
    },
  });
  window.fetch = async (request, options) => {
    const reply = await plain(request, options);
    if (!(request.url ?? String(request)).includes("/queue/data")) return reply;
    const text = reply.body.pipeThrough(new TextDecoderStream()).pipeThrough(late());
    return new Response(text.pipeThrough(new TextEncoderStream()), reply);
  };
})();"""


def test_what_is_asked_while_the_stream_of_answers_ends_is_answered(site: Callable[..., Site]) -> None:
    page = site(FakeEngine()).visit(before=LATE_CLOSE)
    page.wait_for_function("window.closing === 1")
    upload(page, AUDIO / "en_clean_24k.m4a")
    assert page.evaluate("window.closing") >= 2
