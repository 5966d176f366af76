"""Every exception we raise. A message states the fact, the limit and the way out."""


class SpeechError(Exception):
    """Root of all errors that Mynah raises on purpose."""


class RequestError(SpeechError):
    """The caller can fix it: bad text, bad reference, contradicting options."""


class Overloaded(RequestError):
    """The engine has as many requests as it may hold; the same request can succeed later."""


class CheckpointError(SpeechError):
    """The checkpoint is missing, incomplete or contradicts itself. Raised at load."""


class EngineUnavailable(SpeechError):
    """An engine that was asked for cannot run here. Raised at load."""


class GenerationError(SpeechError):
    """This request ends; the engine and the other requests go on."""


def as_generation_error(error: Exception) -> SpeechError:
    """An error of ours as it is; anything else as the end of one request, with its cause kept."""
    if isinstance(error, SpeechError):
        return error
    named = GenerationError(f"the request could not be spoken: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
