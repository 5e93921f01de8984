from collections.abc import Sequence
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_NUM_STOP_STRINGS",
    "Detokenizer",
    "StopStrings",
    "TokenTable",
]

MAX_NUM_STOP_STRINGS: Final[int]

_Tokens: TypeAlias = NDArray[np.int32] | Sequence[int]

@final
class TokenTable:
    def __new__(cls, tokens: Sequence[bytes], special_ids: Sequence[int] = ...) -> TokenTable: ...
    def __len__(self) -> int: ...
    def token_bytes(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...
    def decode(
        self,
        tokens: _Tokens,
        *,
        skip_special_tokens: bool = True,
        strip_leading_space: bool = False,
    ) -> str: ...

@final
class StopStrings:
    def __new__(cls, strings: Sequence[str] = ...) -> StopStrings: ...

@final
class Detokenizer:
    def __new__(
        cls,
        table: TokenTable,
        stops: StopStrings | None = None,
        *,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        strip_leading_space: bool = False,
    ) -> Detokenizer: ...
    def push(self, tokens: _Tokens) -> tuple[str, int | None, int]: ...
    def finish(self) -> str: ...
