"""The engine of `dtbench run`, which gates, profiles and preflights also use.

Modules from the command line to the run file, in the order of use:

    options        the options of a run, parsed and validated
    selection      the suites and tasks that the options select
    launch         `run`: starts the ranks of each launch, or joins those of another launcher
    launch_files   the two files that pass between our launcher and its ranks
    rank           the life of a rank: joins the others, and leaves with an exit code
    session        a rank's part in a run; on rank 0 also the recorder of results
    sampling       measures tasks one by one, with a schedule that the ranks vote on
    measure        the loop that measures an impl, and its result
    clock          times a sample
    (dtbench.records.run writes the result into the run file)

Used by these: `failure` (lost and hanging ranks), `rank_env` (variables of launchers), `rank_votes` (the store, votes
and process groups), `clock_offsets` (a common clock of all ranks), `workers` (child processes and signals), `tasks`,
`progress`, `findings`, `budget` and `refine`.
"""
