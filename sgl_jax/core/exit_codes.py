"""Exit codes of a server and of its engine process, for supervisors.

The code is 0 after a signal and a drain.
"""

FAILED = 1  # the engine or the server failed; the last line of the log has the reason
# For an engine on several hosts, see docs/guide/hosts.md.
GROUP_REFUSED = 70  # the hosts did not all come in time, or their settings or versions differ
HOST_LOST = 71  # another host died, hung or lost the network: start all of them again
KILLED_BY_SIGNAL = 128  # plus the number of a second signal, which ends at once (as in shells)
GROUP_CODES = (GROUP_REFUSED, HOST_LOST)
STEPS_FAILED = 72  # --max-step-failures steps failed in a row: the device does not work
ENGINE_CODES = (*GROUP_CODES, STEPS_FAILED)  # of the engine process, passed on by the server
