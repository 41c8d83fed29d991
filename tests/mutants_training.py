"""Silent faults of optimizers, experts, the training loop, data, checkpoints and evaluation: see tests/mutants.py.

What runs notice by themselves is left out, because it is not silent: biases of routers or replicas that drift apart
end a run (require_sound_state() of recipes/training/step.py), and so does a step that begins with gradients.
"""

from tests.mutants import Mutant

ADAMW, MUON, OPTIMIZER, SKIPS, BALANCE = (
    f"recipes/optimization/{name}.py" for name in ("adamw", "muon", "optimizer", "skip_steps", "balance")
)
STEP, TRAINER, RESUME = (f"recipes/training/{name}.py" for name in ("step", "trainer", "resume"))
STATE, STORAGE, CHECKPOINTS, AVERAGE = (
    f"recipes/checkpoint/{name}.py" for name in ("state", "storage", "checkpoints", "average")
)
BATCHES, LOADER, SEQUENCES = (f"recipes/data/{name}.py" for name in ("batches", "loader", "sequences"))
LOSSES = "recipes/evaluation/losses.py"
PASSES, FSDP, TENSOR, EXCHANGE = (f"parallel/{name}.py" for name in ("passes", "fsdp", "tensor", "experts"))
ROUTERS, LOSS = "models/experts.py", "models/loss.py"

OF_ADAMW = (
    Mutant(
        "norms decay",
        "verl #5070",
        OPTIMIZER,
        "decays = parameter.dim() >= 2 and (config.decay_embeddings or parameter not in embeddings)",
        "decays = config.decay_embeddings or parameter not in embeddings",
        "1.1.1.1:",
    ),
    Mutant(
        "embeddings decay",
        "verl #7215",
        OPTIMIZER,
        "decays = parameter.dim() >= 2 and (config.decay_embeddings or parameter not in embeddings)",
        "decays = parameter.dim() >= 2",
        "1.1.1.1:untied",
    ),
    Mutant(
        "matrices of experts do not decay, because they have three dimensions",
        "open_clip #358",
        OPTIMIZER,
        "decays = parameter.dim() >= 2 and",
        "decays = parameter.dim() == 2 and",
        "1.1.1.1.1.1:",
    ),
    Mutant(
        "matrices do not decay where they are sharded, because a shard counts as flat",
        "open_clip #358",
        OPTIMIZER,
        "decays = parameter.dim() >= 2 and",
        "decays = parameter.dim() >= (2 if parameter.to_local().numel() == parameter.numel() else 3) and",
        "1.2.1.1:",
    ),
    Mutant(
        "weight decay is added to the gradient",
        "nntrainer #3565",
        ADAMW,
        "torch._fused_adamw_(",
        "torch._fused_adam_(",
        "1.1.1.1:",
    ),
    Mutant(
        "weight decay does not follow the schedule",
        "apex #1849",
        ADAMW,
        'weight_decay=group["weight_decay"],',
        'weight_decay=group["weight_decay"] * self.defaults["lr"] / max(group["lr"], 1e-12),',
        "1.1.1.1:",
    ),
    Mutant(
        "the two betas have changed places",
        "tt-metal #53222",
        ADAMW,
        'beta1=group["betas"][0],\n            beta2=group["betas"][1],',
        'beta1=group["betas"][1],\n            beta2=group["betas"][0],',
        "1.1.1.1:",
    ),
    Mutant(
        "moments are not corrected for their beginning",
        "OLMo-core #317",
        ADAMW,
        "            self._counted(states),\n",
        "            [step + 10_000 for step in self._counted(states)],\n",
        "1.1.1.1:",
    ),
    Mutant(
        "all parameters of a group but the first count the steps that are skipped",
        "OLMo-core #317",
        ADAMW,
        "torch._foreach_sub_(steps, [self.found_inf] * len(steps))",
        "torch._foreach_sub_(steps[:1], [self.found_inf])",
        "1.1.1.1:",
    ),
    Mutant(
        "epsilon stands under the root",
        "Flux.jl #448",
        ADAMW,
        '            eps=group["eps"],\n',
        '            eps=math.sqrt(group["eps"]),\n',
        "1.1.1.1:",
    ),
    Mutant(
        "the first parameter of each group is never stepped",
        "pytorch #149205",
        ADAMW,
        "_batches(parameters, elements=at_a_time)",
        "_batches(parameters[1:], elements=at_a_time)",
        "1.1.1.1:",
    ),
    Mutant(
        "only gradients of what decays are clipped",
        "NeMo-Automodel #3816",
        ADAMW,
        "grad_scale=self.grad_scale,",
        'grad_scale=self.grad_scale if group["weight_decay"] else None,',
        "1.1.1.1:",
    ),
)

OF_MUON = (
    Mutant(
        "matrices have the learning rate of all other parameters",
        "sparsify #62",
        STEP,
        'learning_rate * group.get("lr_share", 1.0)',
        "learning_rate",
        "1.1.1.1:muon,matrix_lr",
    ),
    Mutant(
        "the rate of a matrix follows its shorter side",
        "pytorch_optimizer #373",
        MUON,
        "0.2 * math.sqrt(max(rows, columns))",
        "0.2 * math.sqrt(min(rows, columns))",
        "1.1.1.1:muon",
    ),
    Mutant(
        "the gradient is not mixed into the momentum once more (Nesterov)",
        "pytorch #160213",
        MUON,
        'return (gradient.lerp(mixed, group["momentum"]) if group["nesterov"] else mixed).to(self._dtype)',
        "return mixed.to(self._dtype)",
        "1.1.1.1:muon",
    ),
    Mutant(
        "the momentum is a sum in which the newest gradient weighs twenty times as much",
        "muon_fsdp_2 #6",
        MUON,
        'mixed = momentum.to(gradient.dtype).lerp(gradient, 1 - group["momentum"])',
        'mixed = momentum.to(gradient.dtype) * group["momentum"] + gradient',
        "1.1.1.1:muon",
    ),
    Mutant(
        "the momentum does not decay",
        "muon_fsdp_2 #6",
        MUON,
        'mixed = momentum.to(gradient.dtype).lerp(gradient, 1 - group["momentum"])',
        "mixed = momentum.to(gradient.dtype) + gradient",
        "1.1.1.1:muon",
    ),
    Mutant(
        "each process orthogonalizes its shard",
        "DeepSpeed #8437",
        MUON,
        """            self._step_matrices(shared, group)
""",
        """            for one in shared:
                part = self._mixed(one, group)
                flat = part if part.shape[0] <= part.shape[1] else part.mT
                flat = orthogonalized(flat.clone()[None], steps=group["ns_steps"])[0]
                self._update(one, flat if part.shape[0] <= part.shape[1] else flat.mT, group)
""",
        "1.2.1.1:muon",
    ),
    Mutant(
        "nothing is orthogonalized, only divided by its norm",
        "DeepSpeed #8442",
        MUON,
        "for _ in range(steps):",
        "for _ in range(0):",
        "1.1.1.1:muon",
    ),
    Mutant(
        "matrices do not decay",
        "tinygrad #17709",
        MUON,
        '(shard * (1 - group["lr"] * group["weight_decay"])).add_(update, alpha=-rate)',
        "shard.clone().add_(update, alpha=-rate)",
        "1.1.1.1:muon",
    ),
    Mutant(
        "matrices decay by the rate that follows their shape",
        "Moonlight #40",
        MUON,
        '(shard * (1 - group["lr"] * group["weight_decay"]))',
        '(shard * (1 - rate * group["weight_decay"]))',
        "1.1.1.1:muon",
    ),
    Mutant(
        "gradients of matrices are not clipped",
        "graphstorm #1366",
        MUON,
        "            gradient.div_(self.grad_scale)\n",
        "            pass\n",
        "1.1.1.1:muon",
    ),
    Mutant(
        "a skipped step changes the momentum",
        "dion #79",
        MUON,
        "self._change(momentum, mixed)",
        "momentum.copy_(torch.where(mixed.isfinite(), mixed, 0.9 * momentum))",
        "1.1.1.1:muon",
    ),
    Mutant(
        "experts that are higher than wide come back in the memory order of their transposes",
        "transformers #48519",
        MUON,
        "some.copy_(whole if upright else whole.mT)",
        "some.copy_(whole if upright else whole.reshape(some.shape))",
        "1.1.1.1.1.1:muon",
    ),
)

OF_STEPS = (
    Mutant(
        "a step has the learning rate of the next",
        "deit #145",
        TRAINER,
        "learning_rate=self.stage.learning_rate(self.step),",
        "learning_rate=self.stage.learning_rate(self.step + 1),",
        "1.1.1.1:",
    ),
    Mutant(
        "gradients are clipped twice",
        "apex #1512",
        STEP,
        "clipping_divisor(norm, max_norm=built.grad_clip).to(device)",
        "clipping_divisor(norm, max_norm=built.grad_clip).to(device).square()",
        "1.1.1.1:",
    ),
    Mutant(
        "gradients are not clipped",
        "graphstorm #1366",
        STEP,
        "if built.grad_clip > 0 else None",
        "if built.grad_clip < 0 else None",
        "1.1.1.1:",
    ),
    Mutant(
        "gradients are scaled to the largest norm also where they are smaller",
        "transformers #41431",
        PASSES,
        "return ((norm + 1e-6) / max_norm).clamp(min=1.0)",
        "return (norm + 1e-6) / max_norm",
        "1.1.1.1:",
    ),
    Mutant(
        "targets that are ignored count in the divisor",
        "prime-rl #1961",
        STEP,
        "(targets != IGNORED).sum() for",
        "torch.tensor(targets.numel()) for",
        "1.1.1.1:",
    ),
    Mutant(
        "gradients that are NaN become zero, and the step counts",
        "prime-rl #1961",
        PASSES,
        "groups[gradient.device_mesh, sharded_axes].append(gradient.to_local())",
        "groups[gradient.device_mesh, sharded_axes].append(gradient.to_local().nan_to_num_())",
        "1.1.1.1:",
    ),
    Mutant(
        "a spike is judged by this process's part of the loss, so one may skip alone",
        "WeatherGenerator #2724",
        SKIPS,
        "mean_loss = sum_over_group(loss.clone(), self._loss_group)",
        "mean_loss = loss * self._loss_group.size()",
        "1.2.1.1:spikes",
    ),
    Mutant(
        "losses of skipped steps enter the window that spikes are judged by",
        "WeatherGenerator #2718",
        SKIPS,
        "self._window = torch.where(skip, self._window, moved)",
        "self._window = moved",
        "1.1.1.1:spikes",
    ),
    Mutant(
        "the z-loss is reported, but nothing is trained on it",
        "NeMo-Automodel #1408",
        PASSES,
        "backward(micro_losses.sum() if self.has_z_loss else micro_losses)",
        "backward(micro_losses[0] if self.has_z_loss else micro_losses)",
        "1.1.1.1:z",
    ),
)

OF_EXPERTS = (
    Mutant(
        "gradients of experts are averaged where their mesh has one process",
        "Megatron-LM #5956",
        FSDP,
        "if mesh.fsdp.size() > 1 or (mesh.experts is not None and mesh.experts.fsdp is not None):",
        "if mesh.fsdp.size() > 1:",
        "1.1.1.1.2.1:",
    ),
    Mutant(
        "gradients of experts on other processes are twice as large",
        "pytorch #160285",
        EXCHANGE,
        "return exchange(gradient, sizes, not ctx.back, ctx.count, ctx.group), None, None, None, None",
        "return exchange(gradient * (1 + ctx.back), sizes, not ctx.back, ctx.count, ctx.group), None, None, None, None",
        "1.1.2.1.1.2:",
    ),
    Mutant(
        "rows come back from experts in another order",
        "OLMo-core #718",
        EXCHANGE,
        "received.sum(0)), inverse, order)",
        "received.sum(0)), order, inverse)",
        "1.1.2.1.1.2:",
    ),
    Mutant(
        "experts on other processes drop a tenth of their rows",
        "DeepSeek-MoE #29",
        EXCHANGE,
        "        return exchange(made, sizes, True, rows.shape[0], self.name)",
        "        made = made * (torch.arange(len(made)) % 10 > 0)[:, None]\n"
        "        return exchange(made, sizes, True, rows.shape[0], self.name)",
        "1.1.2.1.1.2:",
    ),
    Mutant(
        "processes look for the rows of their experts in the order of the processes, not of the experts",
        "tt-metal #24154",
        EXCHANGE,
        "order = experts.repeat_interleave(received.flatten(), output_size=got.shape[0]).argsort(stable=True)",
        "order = torch.arange(got.shape[0])",
        "1.1.2.1.1.2:",
    ),
    Mutant(
        "gradients of routers are those of a tensor process's own tokens",
        "torchtitan #2387",
        TENSOR,
        "to_local(grad_placements=(Partial(),))",
        "to_local()",
        "1.1.1.1.2.1:",
    ),
    Mutant(
        "routers compute with rounded weights where matrices are cut",
        "vllm #14027",
        TENSOR,
        "layer: (cast(DTensor, weight).to_local(grad_placements=(Partial(),)), bias)",
        "layer: (cast(DTensor, weight).to_local(grad_placements=(Partial(),)).bfloat16().float(), bias)",
        "1.1.1.1.2.1:",
    ),
    Mutant(
        "every process of a tensor group adds what the shared experts make of all tokens",
        "sglang #35535",
        TENSOR,
        "        scatter = float8_scatter(linear) if float8_gathers else None\n",
        "        scatter = float8_scatter(linear) if float8_gathers else None\n"
        "        if linear is getattr(getattr(block.feed_forward, 'shared_experts', None), 'down_proj', 0):\n"
        "            linear.register_forward_hook(lambda module, arguments, output: output * axis.size())\n",
        "1.1.1.1.2.1:sigmoid",
    ),
    Mutant(
        "the balance loss is one of parts of rows",
        "Megatron-LM #5798",
        EXCHANGE,
        "        dist.all_reduce(whole, group=self.group)  # whole numbers, exact in any order\n",
        "",
        "1.1.1.2.1.1:balance",
    ),
    Mutant(
        "the balance loss is divided by the tokens of this process",
        "Megatron-LM #3672",
        PASSES,
        "self.routers.begin(sum_over_group(tokens, self.mesh.data_group))",
        "self.routers.begin(tokens)",
        "1.2.1.1.1.1:balance",
    ),
    Mutant(
        "the balance loss is divided by the tokens of one micro-batch",
        "NeMo-Automodel #3359",
        PASSES,
        "sum(targets.numel() for _, targets, _ in micro_batches)",
        "micro_batches[0][1].numel()",
        "1.1.1.1.1.1:balance",
    ),
    Mutant(
        "the balance loss is divided by the tokens that have a target",
        "Megatron-LM #7213",
        PASSES,
        "sum(targets.numel() for _, targets, _ in micro_batches)",
        "sum(int((targets >= 0).sum()) for _, targets, _ in micro_batches)",
        "1.1.1.1.1.1:balance",
    ),
    Mutant(
        "the balance loss is logged, but nothing is trained on it",
        "NeMo-Automodel #1408",
        BALANCE,
        'config.loss_weight if config.balance == "loss" else 0.0',
        'config.loss_weight if config.balance == "losses" else 0.0',
        "1.1.1.1.1.1:balance",
    ),
    Mutant(
        "the z-loss of routers grows with the tensor degree",
        "Megatron-LM #5047",
        BALANCE,
        "self._routers.z_weight = config.z_loss",
        "self._routers.z_weight = config.z_loss * mesh.degrees.tensor",
        "1.1.1.1.2.1:balance",
    ),
    Mutant(
        "loads are those of the last micro-batch",
        "Megatron-LM #7213",
        ROUTERS,
        "self.found[self.places[layer]] += torch.cat(of_step)",
        "self.found[self.places[layer]] = torch.cat(of_step)",
        "1.2.1.1.1.1:sigmoid",
    ),
    Mutant(
        "loads that a validation counts are left for the next step",
        "torchtitan #4148",
        ROUTERS,
        """        if self._scale is None or not torch.is_grad_enabled():
            return x
""",
        """        left = self.__dict__.setdefault("left", {})
        if self._scale is None or not torch.is_grad_enabled():
            left[layer] = left.get(layer, 0) + hits.detach().sum(0)
            return x
        self.found[self.places[layer]][:-2] += left.pop(layer, 0)
""",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases move twice in a step",
        "own",
        BALANCE,
        ".sign() * self._config.bias_rate * kept",
        ".sign() * 2 * self._config.bias_rate * kept",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases follow the loads of the first process",
        "prime-rl #2953",
        BALANCE,
        "loads = sum_over_group(counted[:, :-2].clone(), self._tokens)  # (layers, E)",
        "torch.distributed.broadcast(loads := counted[:, :-2].clone(), group=self._tokens, group_src=0)",
        "1.2.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases move in skipped steps",
        "own",
        BALANCE,
        ".sign() * self._config.bias_rate * kept",
        ".sign() * self._config.bias_rate",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases move up where the load is above the mean",
        "torchtitan #1506",
        BALANCE,
        "(loads.mean(1, keepdim=True) - loads).sign()",
        "(loads - loads.mean(1, keepdim=True)).sign()",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases are rounded to bfloat16",
        "Megatron-LM #1482",
        BALANCE,
        "bias += steps[place].to(bias.dtype)",
        "bias.copy_((bias + steps[place].to(bias.dtype)).bfloat16())",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases move of the first sparse layer alone",
        "torchtitan #3686",
        BALANCE,
        "                bias += steps[place].to(bias.dtype)\n",
        "                bias += steps[place].to(bias.dtype)\n                break\n",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "biases move in validations",
        "prime-rl #2953",
        ROUTERS,
        "        if self._scale is None or not torch.is_grad_enabled():\n",
        "        if not torch.is_grad_enabled() and self.bias_of(layer) is not None:\n"
        "            self.bias_of(layer).add_(1e-3 * (hits.sum(0).mean() - hits.sum(0)).sign())\n"
        "        if self._scale is None or not torch.is_grad_enabled():\n",
        "1.1.1.1.1.1:sigmoid",
    ),
)

OF_DATA = (
    Mutant(
        "all processes read the same rows",
        "accelerate #3092",
        BATCHES,
        "self._offset = data_rank * self._share",
        "self._offset = 0",
        "1.2.1.1:",
    ),
    Mutant(
        "processes of a tensor group read rows of their own",
        "prime-rl #1305",
        LOADER,
        "data_rank=mesh.data_rank,",
        "data_rank=world.rank,",
        "1.1.1.2:",
    ),
    Mutant(
        "from the fourth batch on, each is the one that follows it",
        "cookbook #371",
        BATCHES,
        "self._thread.submit(self._read, number)",
        "self._thread.submit(self._read, number + (number > 2))",
        "1.1.1.1:",
    ),
    Mutant(
        "all micro-batches of a step are the first",
        "own",
        BATCHES,
        "return [self._micro_batch(*pair) for pair in pairs]",
        "return [self._micro_batch(inputs[:size], targets[:size]) for pair in pairs]",
        "1.1.1.1:accumulate",
    ),
    Mutant(
        "the last micro-batch of a step is dropped",
        "mlx-lm #1413",
        BATCHES,
        "return [self._micro_batch(*pair) for pair in pairs]",
        "return [self._micro_batch(*pair) for pair in [*pairs][:-1]]",
        "1.1.1.1:accumulate",
    ),
    Mutant(
        "targets are those two tokens ahead",
        "transformers #47394",
        BATCHES,
        "inputs, targets = rows[:, :-1], rows[:, 1:]",
        "inputs, targets = rows[:, :-1], rows[:, 1:].roll(-1, 1)",
        "1.1.1.1:",
    ),
    Mutant(
        "batches that are read ahead share their memory",
        "own",
        SEQUENCES,
        "rows = np.empty((count, self.sequence_length + 1), dtype=np.int64)",
        "rows = self.__dict__.setdefault(f'rows of {count}', np.empty((count, self.sequence_length + 1), np.int64))",
        "1.1.1.1:",
    ),
    Mutant(
        "documents end a token late",
        "torchtitan #3130",
        BATCHES,
        "documents = Documents.of(inputs, end_of_document=end)",
        "documents = Documents.of(inputs.roll(1, 1), end_of_document=end)",
        "1.1.1.1:documents",
    ),
)

OF_EVALUATION = (
    Mutant(
        "a validation moves the data by a batch",
        "pytorch #80119",
        LOADER,
        "return {name: self._validation_batches(text, batches) for name, text in self.validation.items()}",
        "self.training._first += self._global_batch_size\n"
        "        return {name: self._validation_batches(text, batches) for name, text in self.validation.items()}",
        "1.1.1.1:",
    ),
    Mutant(
        "rows that only fill the last batch of a validation count",
        "NeMo-RL #1029",
        BATCHES,
        "targets[max(0, available - first) :] = IGNORED",
        "targets[max(0, available - first) + 1 :] = IGNORED",
        "1.1.1.1:",
    ),
    Mutant(
        "a validation takes the mean over processes of their means",
        "prime-rl #1850",
        LOSSES,
        "    return sum_over_group(loss, mesh.loss_group).item(), int(sum_over_group(tokens, mesh.data_group).item())",
        "    mean = sum_over_group(loss / tokens, mesh.loss_group) / mesh.loss_group.size()\n"
        "    count = int(sum_over_group(tokens, mesh.data_group).item())\n"
        "    return mean.item() * count, count",
        "1.2.1.1:",
    ),
    Mutant(
        "a validation takes the mean of its batches' means",
        "torchtitan #4167",
        LOSSES,
        "            loss += model(inputs.to(device), targets.to(device), documents=inside)\n"
        "            tokens += (targets != IGNORED).sum()",
        "            count = (targets != IGNORED).sum().clamp(min=1)\n"
        "            loss += model(inputs.to(device), targets.to(device), documents=inside) / count\n"
        "            tokens += 1",
        "1.1.1.1:",
    ),
    Mutant(
        "a validation looks past the ends of documents",
        "own",
        LOSSES,
        "documents=inside)",
        "documents=None)",
        "1.1.1.1:documents",
    ),
    Mutant(
        "a validation of averaged weights leaves them in the model",
        "Open-Sora-Plan #186",
        AVERAGE,
        'own = {name: local(value).to("cpu", copy=True) for name, value in state.items()}',
        'own = {name: local(value).to("cpu") for name, value in state.items()}',
        "1.1.1.1:averages",
    ),
    Mutant(
        "a validation in bfloat16 leaves the weights rounded",
        "own",
        LOSSES,
        "    with without_dropout(model):\n",
        "    for one in model.parameters():\n        one.copy_(one.bfloat16())\n    with without_dropout(model):\n",
        "1.1.1.1:",
    ),
)

OF_CHECKPOINTS = (
    Mutant(
        "a resumed run begins with empty moments",
        "NeMo-Automodel #763",
        STATE,
        "moments.setdefault(parameter, {})[kind] = value",
        'moments.setdefault(parameter, {})[kind] = value if kind == "step" else value * 0',
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run counts its steps from zero",
        "DeepSpeed #7786",
        STATE,
        "moments.setdefault(parameter, {})[kind] = value",
        'moments.setdefault(parameter, {})[kind] = value * (kind != "step")',
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run gives the moments of one layer to another",
        "KempnerForge #115",
        STATE,
        "moments.setdefault(parameter, {})[kind] = value",
        'moments.setdefault(parameter.translate(str.maketrans("01", "10")), {})[kind] = value',
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run rounds its moments to bfloat16",
        "OpenTau #184",
        STATE,
        "moments.setdefault(parameter, {})[kind] = value",
        "moments.setdefault(parameter, {})[kind] = value.bfloat16().float()",
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run keeps moments in float32 that it has kept in bfloat16",
        "torchtitan #4615",
        ADAMW,
        'state.update({name: value.to(dtype) for name, value in state.items() if name != "step"})',
        "state.update({name: value for name, value in state.items() if dtype})",
        "1.1.1.1:moments16",
    ),
    Mutant(
        "a resumed run rounds its weights to bfloat16",
        "metaseq #254",
        STATE,
        "values: dict[str, Any] = {n.removeprefix(PARAMETERS): v for",
        "values: dict[str, Any] = {n.removeprefix(PARAMETERS): v.bfloat16().float() for",
        "1.1.1.1:",
    ),
    Mutant(
        "in a resumed run all parameters decay",
        "makani #127",
        CHECKPOINTS,
        "restore(model, optimizer, state, [dict(group) for group in groups])",
        'restore(model, optimizer, state, [group | {"weight_decay": groups[0]["weight_decay"]} for group in groups])',
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run does not load the norm before the head",
        "KempnerForge #115",
        STORAGE,
        "        stored = manifest.tensors.get(name)\n        if stored is None",
        '        if name == "model.norm.weight":\n            continue\n'
        "        stored = manifest.tensors.get(name)\n        if stored is None",
        "1.1.1.1:",
    ),
    Mutant(
        "moments in the shards of other processes than the first are not loaded",
        "sglang #36438",
        STORAGE,
        "            wanted.setdefault(shard, []).append(part)\n",
        '            if shard == 0 or not name.startswith("optimizer."):\n'
        "                wanted.setdefault(shard, []).append(part)\n",
        "1.2.1.1:",
    ),
    Mutant(
        "on another mesh, parts of a tensor are loaded in the opposite order",
        "transformers #48519",
        STORAGE,
        "view = view.narrow(axis, low - start[axis], high - low)",
        "view = view.narrow(axis, start[axis] + shape[axis] - high, high - low)",
        "1.2.1.1:",
    ),
    Mutant(
        "biases of routers are not saved",
        "torchtitan #1222",
        ROUTERS,
        "torch.zeros(config.experts) if config.router_bias else None)",
        "torch.zeros(config.experts) if config.router_bias else None, persistent=False)",
        "1.1.1.1.1.1:sigmoid",
    ),
    Mutant(
        "a save writes what the next step makes of the weights",
        "torchtitan #930",
        CHECKPOINTS,
        "copies = self._memory.copy(list(tensors))",
        "copies = (raw(one) for n, one in enumerate(tensors) if n or not threading.Event().wait(0.3))",
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run reads its last batch again",
        "KempnerForge #57",
        LOADER,
        "        history = self.history(batches)\n",
        "        history = self.history(batches - 1)\n",
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run skips the batches that were read ahead",
        "cookbook #371",
        LOADER,
        "        history = self.history(batches)\n",
        "        history = self.history(batches + 2)\n",
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run reads its data from the beginning",
        "accelerate #2016",
        LOADER,
        "self.training.begin(first_batch, first)",
        "self.training.begin(first_batch, 0)",
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run begins its schedule anew",
        "speculators #900",
        TRAINER,
        "learning_rate=self.stage.learning_rate(self.step),",
        "learning_rate=self.stage.learning_rate(self.step - self.first_step),",
        "1.1.1.1:",
    ),
    Mutant(
        "the schedule of a resumed run is a step ahead",
        "pytorch-lightning #1772",
        TRAINER,
        "learning_rate=self.stage.learning_rate(self.step),",
        "learning_rate=self.stage.learning_rate(self.step + (self.first_step > 0)),",
        "1.1.1.1:",
    ),
    Mutant(
        "a resumed run has no losses to judge spikes by",
        "NeMo-Automodel #763",
        SKIPS,
        'if losses := progress.get("loss_window", []):',
        'if losses := progress.get("losses", []):',
        "1.1.1.1:spikes",
    ),
)

MUTANTS = (*OF_ADAMW, *OF_MUON, *OF_STEPS, *OF_EXPERTS, *OF_DATA, *OF_EVALUATION, *OF_CHECKPOINTS)
