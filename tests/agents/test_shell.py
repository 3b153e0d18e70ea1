"""What the shells share, without a broker: whose a record is."""

from __future__ import annotations

import numpy as np
import pytest

from agents.shell import keyed
from schemas.errors import BadRecord
from schemas.inference import Embeddings


@pytest.mark.parametrize("key", [b"another", b"", b"\xff", None])
def test_an_inner_record_whose_key_is_not_its_user_is_refused(key: bytes | None) -> None:
    vectors = Embeddings("u", 7, 1, 0, ["i"], np.ones(1, np.float32), np.ones((1, 4), np.int8))
    assert keyed(b"u", vectors) is vectors
    with pytest.raises(BadRecord, match=r"the record's key is .* but user_id is 'u'") as caught:
        keyed(key, vectors)
    assert caught.value.reason == "key"
