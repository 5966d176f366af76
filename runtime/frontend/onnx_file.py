"""ONNX files of the front end: how they are opened and run."""

from pathlib import Path

import numpy as np
import onnxruntime

from runtime.errors import CheckpointError, EngineUnavailable, GenerationError

CPU = "CPUExecutionProvider"


class OnnxFile:
    """An opened model that takes its inputs by position and gives its first output. Threads may share it."""

    def __init__(self, path: Path, inputs: int, threads: int = 0, provider: str = CPU) -> None:
        if provider not in onnxruntime.get_available_providers():
            raise EngineUnavailable(
                f"onnxruntime has no {provider} here; install the build that has it, or choose {CPU}"
            )
        if not path.is_file():
            raise CheckpointError(f"{path.name} is missing from {path.parent}; download it again")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads  # 0 leaves it to onnxruntime
        options.log_severity_level = 3  # errors only; a warning per unused initializer helps nobody
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
        except Exception as broken:  # onnxruntime has a class per status code and no common base
            raise CheckpointError(f"{path.name} cannot be opened ({broken}); download it again") from broken
        if self._session.get_providers()[0] != provider:  # onnxruntime falls back without a word
            raise EngineUnavailable(f"{provider} did not start for {path.name}; mend its libraries, or choose {CPU}")
        self._names = [entry.name for entry in self._session.get_inputs()]
        if len(self._names) != inputs:
            raise CheckpointError(f"{path.name} has {len(self._names)} inputs, expected {inputs}: is it another model?")
        self.name = path.name
        self.identity = f"{path.name}@{provider}"  # providers differ in the last digits, so caches must tell them apart

    def run(self, *inputs: np.ndarray) -> np.ndarray:
        """First output. Raises GenerationError when the model refuses or fails."""
        try:
            return np.asarray(self._session.run(None, dict(zip(self._names, inputs, strict=True)))[0])
        except Exception as failed:  # as above
            raise GenerationError(f"{self.name} failed: {failed}") from failed
