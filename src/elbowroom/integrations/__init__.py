"""Integrations: a budget in one line of Trainer, Lightning and Accelerate.

    from elbowroom.integrations.transformers import Budget
    trainer = Trainer(model, args, callbacks=[Budget("6 GiB")])

    from elbowroom.integrations.lightning import Budget
    trainer = Trainer(callbacks=[Budget("6 GiB")])

    from elbowroom.integrations.accelerate import fit
    model, optimizer = accelerator.prepare(model, optimizer)
    fit(accelerator, model, optimizer, budget="6 GiB")

Each fits the model after the library has wrapped it and created its optimizers. It writes peak and
setting to the library's own loggers, and releases the model when the training ends. A library is
imported only with its module here.
"""
