"""`dtbench lab`: hosts that are network namespaces of this machine, joined by links of a set rate.

network.py  the namespaces, their links and shapers
run.py      one agent of torch's elastic launcher in each of them
agent.py    what runs inside a host
command.py  the commands
"""
