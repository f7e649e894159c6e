"""Where a live job keeps its optimizer's masters and moments: one module a kind of optimizer, behind one protocol."""
