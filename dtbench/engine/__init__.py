"""The engine of `dtbench run`, on whose parts the gate, profiles and preflight stand. In the order of a sample:

    options    what the user asks for, turned once into a `RunJob`
    launch     `run`: starts the ranks, or joins those that another launcher started
    rank       a rank's life: meets the others, leaves with an exit code
    session    what a rank does in a run, and on rank 0 the recorder of its results
    sampling   tasks one by one, each sampled by a schedule that the ranks vote on
    measure    the one loop that measures an impl, and what comes out of it as a result
    clock      what a sample is timed with
    (dtbench.records.run writes the result into the run file)

Beside them: `failure`, what becomes of a lost or hanging rank; `place`, what a launcher tells its ranks; `ranks`,
the store and the process groups; `clocks`, one clock for all ranks; `workers`, processes and their signals;
`progress`, `findings`, `budget` and `refine`.
"""
