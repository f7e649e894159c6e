"""Where a live job keeps its optimizer's masters and moments: a module for each kind of optimizer, one protocol."""
