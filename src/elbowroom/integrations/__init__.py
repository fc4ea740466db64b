"""One line in the training loops of others: Trainer, Lightning, Accelerate.

    from elbowroom.integrations.transformers import Budget
    trainer = Trainer(model, args, callbacks=[Budget("6 GiB")])

    from elbowroom.integrations.lightning import Budget
    trainer = Trainer(callbacks=[Budget("6 GiB")])

    from elbowroom.integrations.accelerate import fit
    model, optimizer = accelerator.prepare(model, optimizer)
    fit(accelerator, model, optimizer, budget="6 GiB")

Each fits the model once the loop has wrapped it and made its optimizers, writes peak and setting to
the loop's own loggers, and lets go of the model when the training ends. A loop's library is
imported with its module here, and only then.
"""
