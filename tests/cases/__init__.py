"""Recorded cases: faults seen in other servers, with the value that is right."""
