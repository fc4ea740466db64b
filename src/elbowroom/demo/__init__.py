"""The demo: small networks on real data, trained once plain and once through elbowroom.

data, text    what is trained on: images in the package, the standard library's sources
models        a ResNet-18, a GPT, a U-Net
tasks         model + data + loss + score, so that one loop serves all three
train         the loop, as data: it yields what each step was
compare       both runs, and what they took
"""
