"""The mathematics of fuse_jax/rl once more, as plain loops in float64: slow, and plain to see.

Nothing here is shared with the package. Padding is skipped by `if`, never multiplied away.
"""

import math

import numpy as np


def entries(mask):
    """Indices of the kept entries, in order."""
    return [index for index in np.ndindex(np.shape(mask)) if mask[index] != 0]


def mean(x, mask):
    kept = [float(x[i]) for i in entries(mask)]
    return sum(kept) / len(kept) if kept else 0.0


def variance(x, mask):
    kept = [float(x[i]) for i in entries(mask)]
    if not kept:
        return 0.0
    centre = sum(kept) / len(kept)
    return sum((v - centre) ** 2 for v in kept) / len(kept)


def whiten(x, mask, shift_mean=True, eps=1e-8):
    centre, spread = mean(x, mask), variance(x, mask)
    out = np.zeros(np.shape(x))
    for i in entries(mask):
        out[i] = (float(x[i]) - centre) / math.sqrt(spread + eps)
        if not shift_mean:
            out[i] += centre
    return out


def gae(rewards, values, mask, gamma, gae_lambda, bootstrap_values=None):
    """A_t as the explicit sum over later tokens, not by the recursion the package uses."""
    advantages, returns = np.zeros(np.shape(rewards)), np.zeros(np.shape(rewards))
    for b in range(len(rewards)):
        real = [t for t in range(len(rewards[b])) if mask[b][t] != 0]
        r = [float(rewards[b][t]) for t in real]
        v = [float(values[b][t]) for t in real]
        v.append(0.0 if bootstrap_values is None else float(bootstrap_values[b]))
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
        for k, t in enumerate(real):
            advantages[b, t] = sum(
                (gamma * gae_lambda) ** (j - k) * deltas[j] for j in range(k, len(r))
            )
            returns[b, t] = advantages[b, t] + v[k]
    return advantages, returns


def kl(log_prob, ref_log_prob, kind):
    d = float(log_prob) - float(ref_log_prob)
    if kind == "k3":
        d = max(d, -20.0)
        return math.expm1(-d) + d
    return {"k1": d, "abs": abs(d), "k2": d * d / 2}[kind]


def log_softmax(logits):
    top = max(logits)
    log_total = top + math.log(sum(math.exp(z - top) for z in logits))
    return [z - log_total for z in logits]


def full_kl(logits, ref_logits):
    """KL of two rows of finite logits."""
    p, q = log_softmax(logits), log_softmax(ref_logits)
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def adaptive_kl(kl_coef, observed, target, horizon, n_samples):
    error = min(max(observed / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(n_samples / horizon, 1))


def shape_rewards(scores, kl_values, mask, kl_coef):
    rewards = np.zeros(np.shape(kl_values))
    for b in range(len(scores)):
        real = [t for t in range(len(mask[b])) if mask[b][t] != 0]
        for t in real:
            rewards[b, t] = -kl_coef * float(kl_values[b][t])
        if real:
            rewards[b, real[-1]] += float(scores[b])
    return rewards


def loss_weights(mask, mode, sample_valid=None):
    rows, width = np.shape(mask)
    lengths = [
        sum(1 for t in range(width) if mask[b][t] != 0)
        if sample_valid is None or sample_valid[b]
        else 0
        for b in range(rows)
    ]
    weights = np.zeros((rows, width))
    for b in range(rows):
        for t in range(width):
            if mask[b][t] == 0 or lengths[b] == 0:
                continue
            if mode == "token_mean":
                weights[b, t] = 1 / sum(lengths)
            else:
                weights[b, t] = 1 / sum(n > 0 for n in lengths) / lengths[b]
    return weights


def policy_loss(log_probs, old_log_probs, advantages, weights, low, high, dual_clip=None):
    """Loss and metrics, by the cases of the clipped objective."""
    loss = 0.0
    metrics = dict.fromkeys(
        ["clip_fraction", "dual_clip_fraction", "approx_kl", "ratio_mean", "ratio_max"], 0.0
    )
    metrics["log_ratio_abs_max"] = 0.0
    for i in entries(weights):
        w, a = float(weights[i]), float(advantages[i])
        log_ratio = float(log_probs[i]) - float(old_log_probs[i])
        ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
        used = ratio
        if a > 0 and ratio > 1 + high:
            used = 1 + high
        elif a < 0 and ratio < 1 - low:
            used = 1 - low
        metrics["clip_fraction"] += w * (used != ratio)
        if dual_clip is not None and a < 0 and used > dual_clip:
            used = dual_clip
            metrics["dual_clip_fraction"] += w
        loss -= w * used * a
        metrics["approx_kl"] += w * kl(old_log_probs[i], log_probs[i], "k3")
        metrics["ratio_mean"] += w * ratio
        metrics["ratio_max"] = max(metrics["ratio_max"], ratio)
        metrics["log_ratio_abs_max"] = max(metrics["log_ratio_abs_max"], abs(log_ratio))
    return loss, metrics


def value_loss(values, old_values, returns, weights, clip_eps=None):
    loss = 0.0
    names = "value_clip_fraction value_error_sq value_mean return_mean return_sq"
    metrics = dict.fromkeys(names.split(), 0.0)
    for i in entries(weights):
        w, v, old, target = (float(a[i]) for a in (weights, values, old_values, returns))
        error = (v - target) ** 2
        metrics["value_error_sq"] += w * error
        if clip_eps is not None:
            clipped = (min(max(v, old - clip_eps), old + clip_eps) - target) ** 2
            metrics["value_clip_fraction"] += w * (clipped > error)
            error = max(error, clipped)
        loss += w * error / 2
        metrics["value_mean"] += w * v
        metrics["return_mean"] += w * target
        metrics["return_sq"] += w * target**2
    return loss, metrics


def weighted(x, weights):
    return sum(float(weights[i]) * float(x[i]) for i in entries(weights))


def kl_loss(log_probs, ref_log_probs, weights, kind):
    return sum(
        float(weights[i]) * kl(log_probs[i], ref_log_probs[i], kind) for i in entries(weights)
    )


def bradley_terry_loss(chosen, rejected, weights, margin=None, score_l2=0.0):
    loss, metrics = 0.0, {"accuracy": 0.0, "score_margin": 0.0, "score_mean": 0.0}
    for i in entries(weights):
        w, c, r = float(weights[i]), float(chosen[i]), float(rejected[i])
        d = c - r - (0.0 if margin is None else float(margin[i]))
        loss += w * (-math.log(1 / (1 + math.exp(-d))) + score_l2 * (c * c + r * r) / 2)
        metrics["accuracy"] += w * (1.0 if c > r else 0.5 if c == r else 0.0)
        metrics["score_margin"] += w * (c - r)
        metrics["score_mean"] += w * (c + r) / 2
    return loss, metrics


def gradient(f, x, step=1e-6):
    """Central differences of a scalar function of one float64 array."""
    x = np.array(x, np.float64)
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = (f(up) - f(down)) / (2 * step)
    return out
