"""Train the tiny VLM on CPU (or any torch device) from freshly generated data.

    python train.py --minutes 45            # time budget; or --minutes 0 --steps 2000 for a fixed step count

Two phases: (A) the vision tower alone learns per-patch labels (colour, shape, centre, character) from cluttered
scenes; (B) vision tower and language model learn to answer questions, with the per-patch loss kept as an auxiliary.
The auxiliary head is dropped on export.  The training forward below is a batched re-statement of the Hugging Face
modules (same parameters, same result; `python train.py --selftest` compares them).
"""

import argparse
import math
import multiprocessing as mp
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

import build
import data

AUX = [data.N_AUX_COLOR, data.N_AUX_SHAPE, 2, data.N_AUX_CHAR]


# ------------------------------------------------------------------ forward pass
_geo = {}


def geometry(gh, gw, window=8):
    """Window order, window mask and rotary tables for one grid size (patches are in 2x2 merge order)."""
    if (gh, gw) in _geo:
        return _geo[gh, gw]
    h, w = gh // 2, gw // 2
    cells = torch.arange(h * w).view(h, w)
    half = window // 2
    order, sizes = [], []
    for j in range(0, h, half):
        for i in range(0, w, half):
            c = cells[j : j + half, i : i + half].flatten()
            order.append(c)
            sizes.append(len(c) * 4)
    order = torch.cat(order)
    pidx = (order[:, None] * 4 + torch.arange(4)).flatten()
    y = torch.arange(gh)[:, None].expand(gh, gw).reshape(h, 2, w, 2).transpose(1, 2).flatten()[pidx]
    x = torch.arange(gw)[None].expand(gh, gw).reshape(h, 2, w, 2).transpose(1, 2).flatten()[pidx]
    inv = 1.0 / (10000.0 ** (torch.arange(0, 32, 2).float() / 32))
    f = torch.cat([y[:, None] * inv, x[:, None] * inv], -1)
    f = torch.cat([f, f], -1)
    mask = None
    if len(set(sizes)) > 1:
        wid = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        mask = wid[:, None] == wid[None]
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    _geo[gh, gw] = (
        pidx,
        torch.argsort(order),
        f.cos(),
        f.sin(),
        sizes[0] if mask is None else 0,
        mask,
    )
    return _geo[gh, gw]


def rot(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rms(m, x):
    return F.rms_norm(x, (x.shape[-1],), m.weight, m.variance_epsilon)


def patchify(img):
    """uint8 [n, H, W, 3] -> [n, patches, 588], in merge order."""
    n, H, W, _ = img.shape
    x = img.float().div_(127.5).sub_(1)
    x = x.view(n, H // 28, 2, 14, W // 28, 2, 14, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return x.reshape(n, (H // 14) * (W // 14), 588)


def vision(vis, img):
    """-> merged visual tokens [n, cells, 256], raster order."""
    n, H, W, _ = img.shape
    pidx, inv, cos, sin, wsize, mask = geometry(H // 14, W // 14)
    x = patchify(img)[:, pidx]
    x = F.linear(
        x, vis.patch_embed.proj.weight.sum(2).flatten(1)
    )  # both frames of a still image are equal
    N = x.shape[1]
    for li, b in enumerate(vis.blocks):
        h = rms(b.norm1, x)
        q, k, v = b.attn.qkv(h).view(n, N, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rot(q, cos, sin), rot(k, cos, sin)
        if li in vis.fullatt_block_indexes or wsize == N:
            o = F.scaled_dot_product_attention(q, k, v)
        elif wsize:
            q, k, v = (
                t.reshape(n, 2, N // wsize, wsize, 64).transpose(1, 2).reshape(-1, 2, wsize, 64)
                for t in (q, k, v)
            )
            o = F.scaled_dot_product_attention(q, k, v)
            o = o.view(n, N // wsize, 2, wsize, 64).transpose(1, 2).reshape(n, 2, N, 64)
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + b.attn.proj(o.transpose(1, 2).reshape(n, N, 128))
        h = rms(b.norm2, x)
        x = x + b.mlp.down_proj(F.silu(b.mlp.gate_proj(h)) * b.mlp.up_proj(h))
    m = vis.merger
    x = m.mlp(rms(m.ln_q, x).view(n, N // 4, 512))
    return x[:, inv]


_inv_freq = 1.0 / (40.0 ** (torch.arange(0, 64, 2).float() / 64))


def lm_forward(lm, x, pos, mask):
    """x [B,T,256], pos [3,B,T], mask [B,1,T,T] additive -> hidden states."""
    f = pos[..., None].float() * _inv_freq
    f = torch.cat([f[0, ..., :4], f[1, ..., 4:18], f[2, ..., 18:]], -1)
    f = torch.cat([f, f], -1)[:, None]
    cos, sin = f.cos(), f.sin()
    B, T, _ = x.shape
    mid = None
    for li, l in enumerate(lm.layers):
        if li == 2:
            mid = x
        a = l.self_attn
        h = rms(l.input_layernorm, x)
        q = rot(a.q_proj(h).view(B, T, 4, 64).transpose(1, 2), cos, sin)
        k = rot(a.k_proj(h).view(B, T, 2, 64).transpose(1, 2), cos, sin)
        v = a.v_proj(h).view(B, T, 2, 64).transpose(1, 2)
        k, v = (t[:, :, None].expand(B, 2, 2, T, 64).reshape(B, 4, T, 64) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + a.o_proj(o.transpose(1, 2).reshape(B, T, 256))
        h = rms(l.post_attention_layernorm, x)
        x = x + l.mlp.down_proj(F.silu(l.mlp.gate_proj(h)) * l.mlp.up_proj(h))
    return rms(lm.norm, x), mid


# ------------------------------------------------------------------ batches (made in worker processes)
class Tok:
    def __init__(self, tok):
        self.enc = lambda s: tok.encode(s, add_special_tokens=False)
        i = tok.convert_tokens_to_ids
        self.start, self.end, self.vs, self.ve, self.pad = (i(t) for t in build.SPECIAL[1:6])
        nl = self.enc("\n")
        self.user = [self.start] + self.enc("user") + nl
        self.asst = [self.start] + self.enc("assistant") + nl
        self.nl = nl
        self.cache = {}

    def words(self, s):
        if s not in self.cache:
            if len(self.cache) > 20000:
                self.cache.clear()
            self.cache[s] = self.enc(s)
        return self.cache[s]

    def branch(self, turns):
        """Tokens after the image of the first turn, and labels (-100 = no loss)."""
        ids, lab = [], []
        for i, (q, a) in enumerate(turns):
            head = (
                (self.nl + self.user if i else [])
                + self.words(q)
                + [self.end]
                + self.nl
                + self.asst
            )
            ans = self.words(a) + [self.end]
            ids += head + ans
            lab += [-100] * len(head) + ans
        return ids, lab


def prefix(tk, grids):
    """Token ids and M-RoPE positions up to the last <|vision_end|>; grids = [(rows, cols)] of merged tokens."""
    ids, pos, p = [], [], 0

    def text(ts):
        nonlocal p
        for t in ts:
            ids.append(t)
            pos.append((p, p, p))
            p += 1

    text(tk.user)
    for r, c in grids:
        text([tk.vs])
        for j in range(r):
            for i in range(c):
                ids.append(tk.pad)
                pos.append((p, p + j, p + i))
        p += max(r, c)
        text([tk.ve])
    return np.array(ids), np.array(pos).T, p


def pack(rows, p0, endpad=0):
    """rows: per example a list of (ids, labels) branches -> arrays padded to one length."""
    L = max(sum(len(i) for i, _ in r) for r in rows)
    ids, lab = np.full((len(rows), L), endpad), np.full((len(rows), L), -100)
    pos, bid = np.zeros((len(rows), L), np.int64), np.full((len(rows), L), -1)
    for k, r in enumerate(rows):
        o = 0
        for b, (i, l) in enumerate(r):
            n = len(i)
            ids[k, o : o + n], lab[k, o : o + n], bid[k, o : o + n] = i, l, b
            pos[k, o : o + n] = p0 + np.arange(n)
            o += n
    return ids, lab, pos, bid


def token_weights(lab, bid, end):
    """Loss weight per answer token: end markers count little, long answers (captions) do not drown short ones."""
    w = np.where(lab == -100, 0.0, np.where(lab == end, 0.25, 1.0))
    for k in range(len(lab)):
        for b in range(bid[k].max() + 1):
            m = bid[k] == b
            w[k, m] *= min(1.0, 4 / max(1, (lab[k, m] != -100).sum()))
    return w.astype(np.float32)


def merge_order(lab):
    gh, gw, k = lab.shape
    return (
        lab.reshape(gh // 2, 2, gw // 2, 2, k)
        .transpose(0, 2, 1, 3, 4)
        .reshape(gh // 2 * (gw // 2), 4, k)
    )


def pick_size(rng, p):
    """Image side lengths; p in [0,1] is the training progress (curriculum from small to large)."""
    if p < 0.35:
        sides, w = [112, 140, 168, 224], [4, 2, 4, 1]
    elif p < 0.65:
        sides, w = [112, 140, 168, 196, 224, 280], [3, 2, 4, 2, 3, 1]
    else:
        sides, w = [112, 140, 168, 196, 224, 280, 336, 448], [2, 2, 3, 2, 3, 2, 1.5, 0.5]
    while True:
        H, Wd = rng.choices(sides, w)[0], rng.choices(sides, w)[0]
        if H * Wd <= 448 * 336 and max(H, Wd) <= 3 * min(H, Wd):
            return Wd, H


def make_batch(tk, rng, phase, p, cells_per_batch, budget=120):
    if phase == "A":
        Wd, H = pick_size(rng, min(p * 0.6, 0.5))
        n = max(4, min(48, int(2 * cells_per_batch / (Wd * H / 784))))
        scs = [
            data.clutter_scene(rng, Wd, H) if rng.random() < 0.7 else data.make_scene(rng, Wd, H)
            for _ in range(n)
        ]
        return dict(
            img=np.stack([data.render(s, rng) for s in scs]),
            aux=np.stack([merge_order(data.dense_labels(s)) for s in scs]),
        )
    if phase == "text":
        rows = [[tk.branch(data.text_only(rng)[1])] for _ in range(32)]
        ids, lab, pos, bid = pack(rows, len(tk.user))
        return dict(
            prefix=np.array(tk.user),
            ppos=np.arange(len(tk.user))[None].repeat(3, 0),
            ids=ids,
            lab=lab,
            pos=pos,
            bid=bid,
            wt=token_weights(lab, bid, tk.end),
        )
    two = rng.random() < 0.1
    Wd, H = pick_size(rng, p)
    if two and Wd * H > 224 * 224:
        Wd, H = 168, 168
    n = max(4, min(32, int(cells_per_batch / (Wd * H / 784 * (2 if two else 1)))))
    grid = (H // 28, Wd // 28)
    ids, ppos, p0 = prefix(tk, [grid] * (2 if two else 1))
    scs, rows = [], []
    kinds = [
        k for k, w in (("shapes", 64), ("text", 24), ("grid", 9), ("chart", 11)) for _ in range(w)
    ]
    while len(rows) < n:
        if two:
            a, b = data.scene_shapes(rng, Wd, H, 4), data.scene_shapes(rng, Wd, H, 4)
            cand = data.two_image_questions(a, b, rng, 4)
            new = [a, b]
        else:
            a = data.make_scene(rng, Wd, H, rng.choice(kinds))
            cand = data.questions(a, rng, 3 if a["kind"] == "text" else 10)
            if a["kind"] in ("grid", "chart"):
                cand = cand[:5]
            new = [a]
        row, used = [], 0
        for _, turns in cand:
            b = tk.branch(turns)
            if used + len(b[0]) > budget:
                break
            row.append(b)
            used += len(b[0])
        if row:
            rows.append(row)
            scs += new
    i, l, pos, bid = pack(rows, p0)
    return dict(
        img=np.stack([data.render(s, rng) for s in scs]),
        aux=np.stack([merge_order(data.dense_labels(s)) for s in scs]),
        prefix=ids,
        ppos=ppos,
        ids=i,
        lab=l,
        pos=pos,
        bid=bid,
        wt=token_weights(l, bid, tk.end),
    )


def worker(q, seed, a, state):
    torch.set_num_threads(1)
    tk, rng, k = Tok(build.make_tokenizer()), random.Random(seed), 0
    while True:
        phase, p = ("A", "B")[int(state[0])], state[1]
        b = make_batch(tk, rng, phase, p, a.cells)
        if phase == "B":  # keep the characters and shapes coming for the vision tower
            c = [data.clutter_scene(rng, 140, 112) for _ in range(a.clutter)]
            b["clutter"] = dict(
                img=np.stack([data.render(s, rng) for s in c]),
                aux=np.stack([merge_order(data.dense_labels(s)) for s in c]),
            )
        if phase == "B" and k % 4 == 0:
            b["text"] = make_batch(tk, rng, "text", p, a.cells)
        k += 1
        q.put((phase, b))


# ------------------------------------------------------------------ loss
T = torch.as_tensor


def seq_loss(model, vis_tokens, b, pos_head=None):
    lm = model.model.language_model
    pre, ids, lab = T(b["prefix"]), T(b["ids"]), T(b["lab"])
    B, P = len(ids), len(pre)
    E = lm.embed_tokens.weight
    xp = E[pre][None].expand(B, P, -1)
    if vis_tokens is not None:
        xp = xp.clone()
        xp[:, pre == build_pad(b)] = vis_tokens.reshape(B, -1, vis_tokens.shape[-1])
    x = torch.cat([xp, E[ids]], 1)
    L = ids.shape[1]
    bp = T(b["pos"])
    pos = torch.cat([T(b["ppos"])[:, None].expand(3, B, P), bp[None].expand(3, B, L)], -1)
    bid = torch.cat([torch.full((B, P), -2), T(b["bid"])], 1)
    vis_ok = (bid[:, :, None] == bid[:, None, :]) | (bid[:, None, :] == -2)
    ok = vis_ok & torch.ones(P + L, P + L).tril().bool()
    mask = torch.zeros(ok.shape).masked_fill_(~ok, -1e9)[:, None]
    h, mid = lm_forward(lm, x, pos, mask)
    h = h[:, P - 1 : -1]
    sel = lab != -100
    logits = h[sel] @ E.T
    tgt = lab[sel]
    if "wt" in b:
        wt = T(b["wt"])[sel]
        loss = (F.cross_entropy(logits, tgt, reduction="none") * wt).sum() / wt.sum()
    else:
        loss = F.cross_entropy(logits, tgt)
    acc = (logits.argmax(-1) == tgt).float().mean().item()
    if pos_head is None or vis_tokens is None:
        return loss, acc
    # Where am I?  After two layers every visual token should know its row and column (0..15).
    at = pre == build_pad(b)
    o = pos_head(mid[:, :P][:, at])
    pp = T(b["ppos"])[:, at]
    pl, pa = 0.0, 0.0
    for k in (0, 1):
        t = (pp[k + 1] - pp[0])[None].expand(B, -1).flatten()
        z = o[..., 16 * k : 16 * k + 16].flatten(0, 1)
        pl = pl + F.cross_entropy(z, t)
        pa += 0.5 * (z.argmax(-1) == t).float().mean().item()
    return loss, acc, pl, pa


_pad_id = None


def build_pad(b):
    return _pad_id


AUX_W = [torch.tensor([0.4] + [1.0] * (n - 1)) for n in AUX]
AUX_W[2] = torch.tensor([0.3, 1.0])
AUX_W[3] = torch.tensor([0.08] + [1.0] * (AUX[3] - 1))


def aux_loss(head, x, lab):
    out = head(x).view(*x.shape[:2], 4, sum(AUX)).split(AUX, -1)
    lab = T(lab)
    losses, accs = [], []
    for i, o in enumerate(out):
        t = lab[..., i].reshape(-1)
        o = o.reshape(len(t), -1)
        losses.append(F.cross_entropy(o, t, AUX_W[i]))
        pos = t > 0
        accs.append(
            (o.argmax(-1)[pos] == t[pos]).float().mean().item() if pos.any() else float("nan")
        )
    return losses[0] + losses[1] + losses[2] + 3 * losses[3], accs


# ------------------------------------------------------------------ optimiser: Muon for matrices, AdamW for the rest
class Muon:
    def __init__(self, params, mom=0.95, wd=0.02):
        self.groups, self.mom, self.wd = {}, mom, wd
        for n, p in params:
            k = 3 if n.endswith("attn.qkv.weight") else 1
            self.groups.setdefault((p.shape[0] // k, p.shape[1]), []).append((p, k))
        self.buf = {p: torch.zeros_like(p) for g in self.groups.values() for p, _ in g}

    @torch.no_grad()
    def step(self, lr):
        for (m, n), ps in self.groups.items():
            us = []
            for p, k in ps:
                b = self.buf[p]
                b.mul_(self.mom).add_(p.grad, alpha=1 - self.mom)
                us.append(p.grad.lerp(b, self.mom).view(k, m, n))
            x = torch.cat(us)
            tr = m > n
            x = x.mT.contiguous() if tr else x
            x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
            x = x.mT if tr else x
            s, o = 0.2 * math.sqrt(max(m, n)), 0
            for p, k in ps:
                p.mul_(1 - lr * self.wd).add_(x[o : o + k].reshape(p.shape), alpha=-lr * s)
                o += k


def export(model, tok, path):
    import copy

    build.save_processor(path, tok)
    m = copy.deepcopy(model).to(torch.bfloat16)
    m.generation_config.do_sample = False
    m.generation_config.eos_token_id = m.config.text_config.eos_token_id
    m.generation_config.pad_token_id = m.config.text_config.pad_token_id
    m.generation_config.bos_token_id = None
    m.generation_config.max_new_tokens = 48
    m.save_pretrained(path)


def main():
    global _pad_id
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="model")
    ap.add_argument("--ckpt", default="ckpt.pt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--minutes", type=float, default=45)
    ap.add_argument("--steps", type=int, default=2000, help="used when --minutes 0")
    ap.add_argument(
        "--phase-a", type=float, default=0.16, help="share of the budget for vision pre-training"
    )
    ap.add_argument("--cells", type=int, default=1152, help="visual tokens per batch")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument(
        "--decay", type=float, default=0.4, help="last share of the budget: linear decay to zero"
    )
    ap.add_argument("--aux", type=float, default=0.3)
    ap.add_argument(
        "--clutter",
        type=int,
        default=20,
        help="cluttered images per step for the auxiliary loss in phase B",
    )
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--selftest", action="store_true")
    a = ap.parse_args()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    tok = build.make_tokenizer()
    tk = Tok(tok)
    _pad_id = tk.pad
    model = build.new_model(tok)
    vis, lm = model.model.visual, model.model.language_model
    for l in lm.layers:  # smaller residual branches at the start
        l.self_attn.o_proj.weight.data *= 0.3
        l.mlp.down_proj.weight.data *= 0.3
    head = torch.nn.Linear(256, 4 * sum(AUX))
    pos_head = torch.nn.Linear(256, 32)
    if a.selftest:
        return selftest(model, tok, tk)
    named = list(model.named_parameters())
    is_mat = lambda n, p: p.ndim == 2 and "embed_tokens" not in n
    muon_v = Muon([(n, p) for n, p in named if is_mat(n, p) and ".visual." in n])
    muon_l = Muon([(n, p) for n, p in named if is_mat(n, p) and ".visual." not in n])
    rest = [p for n, p in named if not is_mat(n, p)]
    adam = torch.optim.AdamW(
        [dict(params=rest), dict(params=head.parameters()), dict(params=pos_head.parameters())],
        lr=1e-3,
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )
    if a.resume:
        c = torch.load(a.resume)
        model.load_state_dict(c["model"])
        head.load_state_dict(c["head"])
        if "pos" in c:
            pos_head.load_state_dict(c["pos"])
    state = mp.Array("d", [0.0, 0.0])
    q = mp.Queue(6)
    w = mp.Process(target=worker, args=(q, a.seed * 1000 + 17, a, state), daemon=True)
    w.start()
    t0, step, avg, last = time.time(), 0, {}, 0
    seen = [0, 0]
    all_p = [p for _, p in named] + list(head.parameters()) + list(pos_head.parameters())
    while True:
        prog = (time.time() - t0) / 60 / a.minutes if a.minutes else step / a.steps
        if prog >= 1:
            break
        pb = max(0.0, (prog - a.phase_a) / (1 - a.phase_a))
        state[0] = float(prog >= a.phase_a)
        state[1] = pb if prog >= a.phase_a else prog / max(a.phase_a, 1e-9)
        phase, b = q.get()
        if phase == "A" and prog >= a.phase_a:
            continue  # left over in the queue
        warm = min(1.0, (step + 1) / 30)
        lr = a.lr * warm * min(1.0, (1 - prog) / a.decay)
        img = torch.from_numpy(b["img"])
        v = vision(vis, img)
        al, accs = aux_loss(head, v, b["aux"])
        rec = dict(aux=al.item(), acol=accs[0], ashape=accs[1], acen=accs[2], achar=accs[3])
        loss = al
        if phase == "B":
            ql, qa, pl, pa = seq_loss(model, v, b, pos_head)
            cl, caccs = aux_loss(
                head, vision(vis, torch.from_numpy(b["clutter"]["img"])), b["clutter"]["aux"]
            )
            loss = ql + a.aux * (al + cl + pl)
            rec.update(pos=pa, loss=ql.item(), tokacc=qa, cshape=caccs[1], cchar=caccs[3])
            seen[1] += sum(int(x.max()) + 1 for x in b["bid"])
            if "text" in b:
                tl, ta = seq_loss(model, None, b["text"])
                loss = loss + 0.3 * tl
                rec.update(text=tl.item(), textacc=ta)
        seen[0] += len(img)
        for p in all_p:
            p.grad = None
        loss.backward()
        for p in all_p:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        torch.nn.utils.clip_grad_norm_(all_p, 1.0)
        if phase == "A":  # the language model does not train yet
            for p in lm.parameters():
                p.grad.zero_()
        muon_v.step(lr)
        if phase == "B":
            muon_l.step(lr)
        for g in adam.param_groups:
            g["lr"] = lr * 0.6
        adam.step()
        step += 1
        for k, x in rec.items():
            if x == x:
                avg[k] = 0.95 * avg.get(k, x) + 0.05 * x
        if step % 25 == 0:
            print(
                f"{phase} step {step} min {(time.time() - t0) / 60:.2f} lr {lr:.2e} img {seen[0]} qa {seen[1]} size {img.shape[1]}x{img.shape[2]} "
                + " ".join(f"{k} {x:.3f}" for k, x in avg.items()),
                flush=True,
            )
        if time.time() - last > 120:
            last = time.time()
            torch.save(
                dict(
                    model=model.state_dict(),
                    head=head.state_dict(),
                    pos=pos_head.state_dict(),
                    step=step,
                ),
                a.ckpt + ".tmp",
            )
            os.replace(a.ckpt + ".tmp", a.ckpt)
    torch.save(
        dict(
            model=model.state_dict(), head=head.state_dict(), pos=pos_head.state_dict(), step=step
        ),
        a.ckpt,
    )
    export(model, tok, a.out)
    w.terminate()
    print(
        "done: steps",
        step,
        "images",
        seen[0],
        "questions",
        seen[1],
        "minutes",
        round((time.time() - t0) / 60, 1),
    )


@torch.no_grad()
def selftest(model, tok, tk):
    """The fast forward must equal the Hugging Face forward, processor included."""
    import tempfile
    from PIL import Image
    from transformers import AutoProcessor

    d = tempfile.mkdtemp()
    build.save_processor(d, tok)
    proc = AutoProcessor.from_pretrained(d)
    rng = random.Random(0)
    model.eval()
    for W, H, n in ((112, 112, 1), (168, 140, 1), (224, 224, 1), (252, 112, 2), (336, 196, 1)):
        scs = [data.scene_shapes(rng, W, H) for _ in range(n)]
        imgs = [data.render(s, rng) for s in scs]
        content = [dict(type="image", image=Image.fromarray(i)) for i in imgs] + [
            dict(type="text", text="What is it?")
        ]
        x = proc.apply_chat_template(
            [dict(role="user", content=content), dict(role="assistant", content="a red ring")],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ref = model(**x).logits[0]
        ids, ppos, p0 = prefix(tk, [(H // 28, W // 28)] * n)
        bi, bl = tk.branch([("What is it?", "a red ring")])
        assert x["input_ids"][0].tolist() == list(ids) + bi + tk.nl, "tokens differ"
        i, l, pos, bid = pack([[(bi, bl)]], p0)
        v = vision(model.model.visual, torch.from_numpy(np.stack(imgs)))
        hv = model.model.visual(x["pixel_values"], grid_thw=x["image_grid_thw"]).pooler_output
        print(W, H, "vision diff", (v.reshape(-1, 256) - hv).abs().max().item(), end=" ")
        loss, _ = seq_loss(model, v, dict(prefix=ids, ppos=ppos, ids=i, lab=l, pos=pos, bid=bid))
        sel = torch.tensor(bl) != -100
        at = torch.arange(len(ids) - 1, len(ids) - 1 + len(bi))
        rl = F.cross_entropy(ref[at][sel], torch.tensor(bl)[sel])
        print("loss", loss.item(), "reference", rl.item())
        assert abs(loss.item() - rl.item()) < 1e-3


if __name__ == "__main__":
    main()
