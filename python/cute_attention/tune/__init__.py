"""The tuner: rows like one of the tables, compiled, measured beside it, and a verdict.

The modules, in the order in which a search flows through them:

    subjects    what is tuned: a row of the tables, and the points at which it is measured
    plan        the candidates of each subject: those of `rows.candidates`, and the user's own
    folder      what a search has come to, in files: it goes on from there, also on another machine
    measure     the candidates, the present row and the peers in turn, after a trial of each
    verdict     whether a candidate replaces the row, and the line for the table
    show        the table and the plot

`command` runs them, and `cute_attention.cli.tune` reads the options. Nothing else imports them.
"""
