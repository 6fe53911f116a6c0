"""`dtbench profile`: where the time of a case goes, of simulated worlds (`calls`) and of real ranks (`ranks`)."""
