"""All rows of the table of Megatron's arguments."""

from __future__ import annotations

from mcore_ckpt_ext.job.arguments.model import ModelTable
from mcore_ckpt_ext.job.arguments.other import OtherTable
from mcore_ckpt_ext.job.arguments.row import rows_of
from mcore_ckpt_ext.job.arguments.run import RunTable

ROWS = rows_of(ModelTable, RunTable, OtherTable)
"""The rows by the names of their arguments; arguments without a row are in `without_effect`, or are not known."""

BRIDGE_FIELDS = tuple((field.name or name, name, field) for name, row in ROWS.items() for field in row.bridge)
"""The fields of Megatron-Bridge: the name of each there, the name of its argument, and what else is known of it."""
