"""`dtbench predict`: what a transformer's shardings spend on communication, at sizes and meshes that a
calibrated topology covers or that lie beyond it.

    models.py     the transformer: built in, or from a file
    shardings.py  which collectives each sharding needs, per layer and per step, and how large they are
    prices.py     what one of them takes, on more ranks than were measured too
    prediction.py both together, with everything that was assumed
    show.py       tables and JSON
"""
