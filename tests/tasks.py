"""Tasks of the lm-evaluation-harness with data on the disk, and a small exported model to answer them."""

import json
from pathlib import Path

from tests.tiny_llama import save_tiny_llama

CONTEXT = 64
TASKS = {
    "choices": """
output_type: multiple_choice
fewshot_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "um"], max_gen_toks: 24, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}
DOCUMENTS = {
    "questions": [
        {
            "question": f"Document {n}: words and" + " numbers, more" * (n % 7),
            "choices": [" numbers", " naïve words", " 1", " 2"],
            "answer": n % 4,
        }
        for n in range(12)
    ],
    "pages": [{"page": f"Page {n}: " + "naïve words and numbers, " * (n * 3 % 17)} for n in range(7)],
}


def write_tasks(folder: Path) -> Path:
    """A file for each task and its data, in a new folder."""
    folder.mkdir()
    for name, documents in DOCUMENTS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    for name, body in TASKS.items():
        data = folder / f"{'pages' if name == 'texts' else 'questions'}.jsonl"
        source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (folder / f"{name}.yaml").write_text(source + body)
    return folder


def write_model(folder: Path) -> Path:
    """A Llama with random weights and a tokenizer, saved by transformers."""
    text = folder / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": document["page"]}) for document in DOCUMENTS["pages"]))
    return save_tiny_llama(folder, text, max_position_embeddings=CONTEXT)
