"""What else has changed since: the launcher's option, and files that ``torch.load`` reads."""

from __future__ import annotations

import ast

from harness.tools.port.context import AS_IS, CHANGED, SAME, Context, constant


def rewrite(context: Context) -> None:
    for node in ast.walk(context.source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = [constant(argument) for argument in node.args]
        if name.endswith("add_argument") and "--local_rank" in options:
            _local_rank(context, node, options)
        elif name == "torch.load" and not {"weights_only"} & {keyword.arg for keyword in node.keywords}:
            do = "since torch 2.6, reads only plain data; for other files that you trust, pass weights_only=False"
            context.note(node, CHANGED, "torch.load", do)
        elif name.endswith("init_process_group"):
            context.note(node, AS_IS, name, "start the script with torchrun")
        elif name.endswith(("nn.DataParallel", "nn.parallel.DistributedDataParallel")):
            context.note(node, AS_IS, name, "torch's own")
    native = [n for n in ast.walk(context.source.tree) if isinstance(n, ast.Attribute) and n.attr == "GradScaler"]
    if native:
        do = "the script also has a code path for torch's amp; choosing it may be simpler than this patch"
        context.note(native[0], AS_IS, ast.unparse(native[0]), do)


def _local_rank(context: Context, call: ast.Call, options: list[object]) -> None:
    """Accept both spellings, and the variable that torchrun sets instead."""
    source = context.source
    if "--local-rank" not in options:
        end = source.span(call.args[options.index("--local_rank")])[1]
        context.edits.replace_span(end, end, ', "--local-rank"')
    do = "since torch 2.0, torch.distributed.launch passes --local-rank; torchrun sets LOCAL_RANK: both are read"
    context.note(call, SAME, "--local_rank", do)
    if any(keyword.arg is None for keyword in call.keywords):
        return
    keywords = {keyword.arg: keyword for keyword in call.keywords}
    default, required = keywords.get("default"), keywords.get("required")
    if required is not None and constant(required.value) is True:
        context.edits.replace(required.value, '"LOCAL_RANK" not in os.environ')
    if default is None:
        end = source.span(call)[1] - 1
        comma = "" if source.text[:end].rstrip().endswith(",") else ", "
        context.edits.replace_span(end, end, f'{comma}default=os.environ.get("LOCAL_RANK")')
    elif isinstance(constant(default.value), int):
        context.edits.replace(default.value, f'int(os.environ.get("LOCAL_RANK", {source.source(default.value)}))')
    elif isinstance(default.value, ast.Constant):
        context.edits.replace(default.value, f'os.environ.get("LOCAL_RANK", {source.source(default.value)})')
    else:
        return
    context.imports.add("os")
