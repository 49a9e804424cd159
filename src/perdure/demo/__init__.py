"""`perdure demo`: trains on real digits, is killed, resumes elsewhere, and ends with the same bits."""
