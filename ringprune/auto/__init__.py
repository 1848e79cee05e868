"""``policy="auto"``: measures links and ranks at the start, and exchanges as is predicted to be the fastest."""

from ringprune.auto.choice import Auto, as_choice
from ringprune.auto.pilot import Pilot

__all__ = ["Auto", "Pilot", "as_choice"]
