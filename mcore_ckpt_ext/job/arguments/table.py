"""All rows of the table of Megatron's arguments."""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.other import OtherTable
from mcore_ckpt_ext.job.arguments.row import rows_of
from mcore_ckpt_ext.job.arguments.run import RunTable

ROWS = rows_of(ModelTable, RunTable, OtherTable)
"""The rows by the names of their arguments; an argument without a row is in `without_effect`, or unknown."""

BRIDGE_FIELDS = tuple((field.name or name, name, field) for name, row in ROWS.items() for field in row.bridge)
"""The fields of Megatron-Bridge: name of the field, name of its argument, and description."""
