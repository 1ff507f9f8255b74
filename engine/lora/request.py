"""`LoRARequest`: how a request names its adapter, with vLLM's fields. Part 18."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoRARequest:
    """A request's adapter: `LLM.generate(..., lora_request=LoRARequest("poetry", 1, "adapters/poetry"))`.

    Raises ValueError if a field is empty, has the wrong type or is out of range.
    """

    lora_name: str  # not empty
    lora_int_id: int  # 1 or more; each adapter has its own number
    lora_path: str | Path = ""  # a folder in PEFT's format; must be given (vLLM has this default)

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name={self.lora_name!r}: a name is accepted")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id={self.lora_int_id!r}: a whole number from 1 on is accepted")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise ValueError(f"lora_path={self.lora_path!r}: a folder is accepted")

    # vLLM has these names, too.

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str | Path:
        return self.lora_path
