"""Which adapter and which prompt template wrote a row: short hashes that travel with it, and what does not fit refused.

A recorded log-prob means something only under the distribution that was sampled from: temperature, legal digits,
adapter, prompt. The first two are used as recorded; of the others the trainer must hold the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from bt_policy.encoding import Encoder
from bt_policy.rows import Row
from common.errors import UserError

DIGITS = 16


def of_adapter(state: Mapping[str, Tensor]) -> str:
    """The hash of an adapter's weights, names included."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def of_template(encoder: Encoder) -> str:
    """The hash of what the prompt template renders for an example, with and without memory."""
    examples = encoder.text("red ball", None), encoder.text("red ball", ("01", "10"))
    return hashlib.sha256("\0".join(examples).encode()).hexdigest()[:DIGITS]


def check(rows: Sequence[Row], *, adapter: str, template: str) -> None:
    """UserError names the first row that another adapter or another template wrote. Rows that record neither pass."""
    for row in rows:
        if row.template is not None and row.template != template:
            raise UserError(
                f"line {row.line} of data.train: template: the row was sampled with another prompt template "
                f"({row.template}) than the configured one ({template}); set prompt as it was, or sample again."
            )
        if row.adapter is not None and row.adapter != adapter:
            raise UserError(
                f"line {row.line} of data.train: adapter: the row was sampled from another adapter ({row.adapter}) "
                f"than the one that is trained ({adapter}); set model.adapter to the one that wrote it, or "
                f"data.any_adapter=true."
            )
