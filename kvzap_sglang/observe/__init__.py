"""What a press tells its users."""

from kvzap_sglang.observe.kept import pack_kept, unpack_kept

__all__ = ["pack_kept", "unpack_kept"]
