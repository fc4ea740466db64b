"""er.nn.fp8 on models of transformers and under adapters of peft: what is recognized and held."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import elbowroom as er  # noqa: E402

TOKENS, HIDDEN = 64, 128


def llama():
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
    )
    ids = torch.randint(0, 100, (2, TOKENS))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def gpt2():
    config = transformers.GPT2Config(
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        vocab_size=100,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    ids = torch.randint(0, 100, (2, TOKENS))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def vit():
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=4,
    )
    pixels = torch.randn(2, 3, 32, 32)
    labels = torch.tensor([0, 1])
    return transformers.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": labels,
    }


MODELS = {
    # classes that are replaced, and how much a block may hold, in U
    llama: ({"Fp8Linear": 15, "Fp8Norm": 5, "Fp8Activation": 2, "Fp8Flow": 6}, 7.0),
    gpt2: ({"Fp8Columns": 8, "Fp8Linear": 1, "Fp8Norm": 5, "Fp8Activation": 2, "Fp8Flow": 6}, 7.0),
    vit: ({"Fp8Linear": 13, "Fp8Norm": 5, "Fp8Activation": 2, "Fp8Flow": 6}, 7.0),
}


def held_nbytes(model, inputs, block):
    """Distinct storages that autograd saves inside a block, but for parameters and the angles."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held, inside = {}, []

    def pack(t):
        angles = t.dim() == 4 and t.shape[:2] == (1, 1)
        if inside and t.untyped_storage().data_ptr() not in own and not angles:
            held[t.untyped_storage().data_ptr()] = t
        return t

    hooks = (
        block.register_forward_pre_hook(lambda *args: inside.append(1)),
        block.register_forward_hook(lambda *args: inside.clear()),
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**inputs).loss
    for hook in hooks:
        hook.remove()
    return sum(t.untyped_storage().nbytes() for t in held.values()), loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def error2(found, true):
    assert found.keys() == true.keys()
    wrong = sum(float((found[n] - true[n]).float().square().sum()) for n in true)
    return wrong / sum(float(g.float().square().sum()) for g in true.values())


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_all_layers_are_recognized_and_a_block_holds_little(make):
    torch.manual_seed(0)
    model, inputs = make()
    model = model.bfloat16().train()
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    _, loss = held_nbytes(model, inputs, blocks[1])
    plain, true = loss.item(), gradients(model, loss)
    expected, most = MODELS[make]
    report = er.nn.fp8(model)
    found = {}
    for swap in report.swaps:
        kind = swap.now.removeprefix("er.nn.")
        found[kind] = found.get(kind, 0) + 1
    assert found == expected
    assert report.left == ()
    nbytes, loss = held_nbytes(model, inputs, blocks[1])
    tokens = TOKENS if "input_ids" in inputs else TOKENS + 1
    assert nbytes / (2 * tokens * HIDDEN * 2) <= most
    assert loss.item() == pytest.approx(plain, rel=0.03)
    assert error2(gradients(model, loss), true) < 0.1
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    er.nn.revert(model)
    assert model(**inputs).loss.item() == plain


def test_adapters_over_a_frozen_base_in_fp8():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, inputs = llama()
    lora = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
    model = peft.get_peft_model(model.bfloat16(), lora).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    true = gradients(model, model(**inputs).loss)
    rounded = copy.deepcopy(model)
    er.nn.fp8(rounded)
    live = gradients(rounded, rounded(**inputs).loss)
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad and p.dim() == 2)
    tokens = model.get_input_embeddings().weight.nbytes
    before = sum(t.nbytes for t in model.state_dict().values())
    report = er.nn.fp8(model, frozen=True)
    assert "15 frozen weights are held in FP8" in str(report)
    after = sum(t.nbytes for t in model.state_dict().values())
    assert before - after == (base - tokens) // 2 - 15 * 4
    found = gradients(model, model(**inputs).loss)
    assert all(map(torch.equal, found.values(), live.values()))
    assert error2(found, true) < 0.1
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(**inputs).loss
        gradients(model, loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
