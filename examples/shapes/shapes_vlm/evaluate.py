"""Accuracy of the tiny VLM on held-out seeds, through plain Hugging Face transformers on CPU.

    python eval.py --model model --out eval.json            # everything
    python eval.py --model model --n 20 --only color,ocr    # a quick look

Every question has its own freshly drawn image (seeds no training run uses).  Score: exact match after
lower-casing and dropping surrounding blanks and a final full stop.  Three tables:
  tasks    accuracy per task at the image's own resolution
  tiers    the same questions on 224..336-pixel images with max_pixels at 1, 1/2 and 1/4 of the image
  pooling  the same questions with the projector's output mean-pooled 1x, 2x (1x2) and 4x (2x2) before the
           language model; a pooled token takes the mean M-RoPE position of its members
"""

import argparse
import json
import multiprocessing
import random
import time

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache

import data

SEED = 90_000_000
GROUPS = {
    "color": ["color"],
    "shape": ["shape"],
    "count<=4": ["count_all<=4", "count_color", "count_shape"],
    "relations": ["rel_yesno", "rel_what", "extreme", "where"],
    "ocr": ["ocr", "ocr_line"],
}


def build_questions(task, n, sides, seed):
    """n items: dict(images, turns, meta); deterministic in (task, seed)."""
    rng = random.Random(f"{seed}/{task}")
    out = []
    while len(out) < n:
        W, H = rng.choice(sides), rng.choice(sides)
        if max(W, H) > 3 * min(W, H):
            continue
        if task.startswith("text:"):
            t, turns = data.text_only(rng)
            if t == task[5:]:
                out.append(dict(images=[], turns=turns, meta={}))
            continue
        if task.startswith("compare"):
            a, b = data.scene_shapes(rng, W, H, 4), data.scene_shapes(rng, W, H, 4)
            qs = [q for q in data.two_image_questions(a, b, rng, 3) if q[0] == task]
            scs = [a, b]
        else:
            base = task.split("<")[0].split(">")[0]
            kinds = [k for k, v in data.TASKS.items() if base in v]
            sc = data.make_scene(
                rng, W, H, kinds[rng.randrange(len(kinds))] if base != "ocr" else "text"
            )
            qs = data.questions(sc, rng, 1, only=[base])
            if qs and task == "count_all<=4" and int(qs[0][1][0][1]) > 4:
                continue
            if qs and task == "count_all>4" and int(qs[0][1][0][1]) <= 4:
                continue
            scs = [sc]
        if not qs:
            continue
        meta = dict(size=[W, H])
        if task.startswith("ocr"):
            t = [t for t in scs[0]["texts"] if t["s"] == qs[0][1][0][1]][0]
            meta.update(font=t["size"], length=len(t["s"]))
        out.append(
            dict(
                images=[Image.fromarray(data.render(s, rng)) for s in scs],
                turns=qs[0][1],
                meta=meta,
            )
        )
    return out


TASKS = [
    "color",
    "shape",
    "count_all<=4",
    "count_all>4",
    "count_color",
    "count_shape",
    "exist",
    "background",
    "where",
    "rel_yesno",
    "rel_what",
    "extreme",
    "caption",
    "ocr",
    "ocr_line",
    "text_color",
    "char_count",
    "cell",
    "grid_size",
    "bar_extreme",
    "bar_value",
    "bar_count",
    "compare_count",
    "compare_color",
    "compare_shape",
    "multi_turn",
    "text:arithmetic",
    "text:spell",
    "text:repeat",
    "text:no_image",
    "text:chat",
]


def norm(s):
    return s.strip().lower().rstrip(".").strip()


class Runner:
    def __init__(self, path, threads):
        torch.set_num_threads(threads)
        self.proc = AutoProcessor.from_pretrained(path)
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.tokens = 0

    def messages(self, item, history, q):
        m = [dict(role=r, content=[dict(type="text", text=t)]) for r, t in history + [("user", q)]]
        m[0]["content"] = [dict(type="image", image=i) for i in item["images"]] + m[0]["content"]
        return m

    @torch.inference_mode()
    def generate(self, item, history, q, scale=1.0, pool=1):
        kw = {}
        if item["images"] and scale != 1.0:
            px = int(item["images"][0].width * item["images"][0].height * scale)
            kw = dict(processor_kwargs=dict(size=dict(shortest_edge=56 * 56, longest_edge=px)))
        x = self.proc.apply_chat_template(
            self.messages(item, history, q),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **kw,
        )
        self.tokens = int((x["input_ids"] == self.model.config.image_token_id).sum()) // pool
        if pool == 1:
            y = self.model.generate(**x, max_new_tokens=40, do_sample=False)
            return self.proc.decode(y[0, x["input_ids"].shape[1] :], skip_special_tokens=True)
        return self.pooled(x, pool)

    def pooled(self, x, pool):
        """Greedy decoding with mean-pooled visual tokens (pool 2: pairs along x; pool 4: 2x2 blocks)."""
        m = self.model.model
        ids = x["input_ids"][0]
        pos, _ = m.get_rope_index(
            x["input_ids"],
            mm_token_type_ids=x["mm_token_type_ids"],
            image_grid_thw=x["image_grid_thw"],
            attention_mask=x["attention_mask"],
        )
        pos = pos[:, 0].float()
        emb = m.language_model.embed_tokens(ids)
        vis = m.visual(x["pixel_values"], grid_thw=x["image_grid_thw"]).pooler_output
        E, P, o, i = [], [], 0, 0
        grids = (x["image_grid_thw"][:, 1:] // 2).tolist()
        g = 0
        while i < len(ids):
            if ids[i] != self.model.config.image_token_id:
                E.append(emb[i : i + 1])
                P.append(pos[:, i : i + 1])
                i += 1
                continue
            r, c = grids[g]
            g += 1
            v, p = vis[o : o + r * c].view(r, c, -1), pos[:, i : i + r * c].view(3, r, c)
            ph, pw = (2, 2) if pool == 4 else (1, 2)
            for a in range(0, r, ph):
                for b in range(0, c, pw):
                    E.append(v[a : a + ph, b : b + pw].flatten(0, 1).mean(0, keepdim=True))
                    P.append(p[:, a : a + ph, b : b + pw].flatten(1).mean(1, keepdim=True))
            o += r * c
            i += r * c
        E, P = torch.cat(E)[None], torch.cat(P, 1)[:, None]
        cache, out, nxt = DynamicCache(), [], float(P.max()) + 1
        for _ in range(40):
            h = m.language_model(
                inputs_embeds=E, position_ids=P, past_key_values=cache, use_cache=True
            ).last_hidden_state
            t = int(self.model.lm_head(h[0, -1]).argmax())
            if t == self.model.config.text_config.eos_token_id:
                break
            out.append(t)
            E, P = m.language_model.embed_tokens(torch.tensor([[t]])), torch.full((3, 1, 1), nxt)
            nxt += 1
        return self.proc.decode(out, skip_special_tokens=True)

    def score(self, items, **kw):
        """Exact match of the last turn (earlier turns are answered by the model itself)."""
        hits, toks, wrong = [], 0, []
        for it in items:
            history = []
            for q, ref in it["turns"]:
                ans = self.generate(it, history, q, **kw)
                history += [("user", q), ("assistant", ans)]
            hits.append(norm(ans) == norm(ref))
            toks += self.tokens
            if not hits[-1]:
                wrong.append([q, ref, ans])
        return hits, toks / len(items), wrong


TRADE = [
    "color",
    "shape",
    "count_all",
    "count_color",
    "exist",
    "where",
    "rel_what",
    "extreme",
    "ocr",
    "cell",
    "bar_extreme",
    "bar_value",
]
MODES = {
    "tiers": {"1": {}, "1/2": dict(scale=0.5), "1/4": dict(scale=0.25)},
    "pooling": {"2x": dict(pool=2), "4x": dict(pool=4)},
}
_run = None


def init(path, threads):
    global _run
    _run = Runner(path, threads)


def unit(u):
    table, mode, task, n = u
    if table == "tasks":
        items, kw = build_questions(task, n, [112, 168, 224, 280, 336], SEED), {}
    else:
        items, kw = build_questions(task, n, [224, 280, 336], SEED + 1), MODES[table][mode]
    hits, toks, wrong = _run.score(items, **kw)
    return u, hits, toks, wrong, [i["meta"] for i in items]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="model")
    ap.add_argument("--out", default="")
    ap.add_argument("--n", type=int, default=60, help="questions per task")
    ap.add_argument(
        "--n-trade", type=int, default=40, help="questions per task in the tier and pooling tables"
    )
    ap.add_argument("--only", default="", help="comma-separated tasks; skips the other tables")
    ap.add_argument("--jobs", type=int, default=2, help="worker processes, one thread each")
    a = ap.parse_args()
    t0 = time.time()
    units = [("tasks", "1", t, a.n) for t in (a.only.split(",") if a.only else TASKS)]
    if not a.only:
        units += [(tb, m, t, a.n_trade) for tb, ms in MODES.items() for m in ms for t in TRADE]
    res = dict(
        config=dict(weights="bfloat16", compute="float32", seed=SEED, n=a.n, n_trade=a.n_trade),
        tasks={},
        errors={},
        tiers={},
        pooling={},
    )
    ocr = []
    with multiprocessing.get_context("spawn").Pool(a.jobs, init, (a.model, 1)) as pool:
        for (table, mode, t, _), hits, toks, wrong, metas in pool.imap(unit, units):
            acc = round(sum(hits) / len(hits), 4)
            if table == "tasks":
                res["tasks"][t] = dict(accuracy=acc, n=len(hits), visual_tokens=round(toks, 1))
                res["errors"][t] = wrong[:3]
                if t.startswith("ocr"):
                    ocr += list(zip(hits, metas))
            else:
                d = res[table].setdefault(mode, dict(tokens=[]))
                d[t] = acc
                d["tokens"].append(toks)
            print(f"{table} {mode:4s} {t:16s} {acc:.3f} tokens {toks:.0f}  {wrong[:2]}", flush=True)
    if not a.only:
        res["groups"] = {
            g: round(sum(res["tasks"][t]["accuracy"] for t in ts) / len(ts), 4)
            for g, ts in GROUPS.items()
        }
        vis = [v["accuracy"] for t, v in res["tasks"].items() if not t.startswith("text:")]
        res["mean_image_tasks"] = round(sum(vis) / len(vis), 4)

        def rate(f):
            h = [x for x, m in ocr if f(m)]
            return dict(accuracy=round(sum(h) / max(1, len(h)), 4), n=len(h))

        res["ocr_detail"] = {
            "font 16-20": rate(lambda m: m["font"] <= 20),
            "font 21-27": rate(lambda m: 20 < m["font"] <= 27),
            "font 28+": rate(lambda m: m["font"] > 27),
        }
        res["ocr_detail"].update(
            {f"length {k}": rate(lambda m, k=k: m["length"] == k) for k in (1, 2, 3, 4)}
        )
        for tb in ("tiers", "pooling"):
            for m, d in res[tb].items():
                tk = d.pop("tokens")
                res[tb][m] = dict(
                    visual_tokens=round(sum(tk) / len(tk), 1),
                    mean=round(sum(d.values()) / len(d), 4),
                    **d,
                )
        res["pooling"] = {"1x": res["tiers"]["1"], **res["pooling"]}
        for k in ("groups", "ocr_detail", "mean_image_tasks", "tiers", "pooling"):
            print(k, res[k])
    res["seconds"] = round(time.time() - t0)
    if a.out:
        with open(a.out, "w") as f:
            json.dump(res, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
