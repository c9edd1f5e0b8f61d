from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import Response

_encoder = msgspec.json.Encoder()


def json_response(body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoder.encode(body), headers=headers, media_type="application/json")
