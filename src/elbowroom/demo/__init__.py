"""The demo: small networks on real data, trained once plainly and once through elbowroom.

data, text    the data: images in the package, sources of the standard library
models        a ResNet-18, a GPT and a U-Net
tasks         model, data, loss and score, so that one loop serves all three
train         the training loop, as an iterator over its steps
compare       runs both trainings, and compares their figures
"""
