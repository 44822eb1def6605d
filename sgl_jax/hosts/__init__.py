"""One engine over several hosts: their meeting, the channel of host 0's commands, and its ends."""
