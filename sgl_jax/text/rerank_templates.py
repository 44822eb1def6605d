"""The prompts by which models that generate text judge whether documents are relevant."""

from typing import NamedTuple


class RerankTemplate(NamedTuple):
    """A prompt of one query and one document, after which the model answers with a label."""

    text: str
    default_instruct: str
    labels: tuple[str, str]  # relevant, and not; each is one token

    def prompt(self, query: str, document: str, instruct: str | None = None) -> str:
        """Return the prompt; `instruct` says what makes a document relevant."""
        return self.text.format(
            instruct=instruct or self.default_instruct, query=query, document=document
        )


# By the value of --rerank-template.
RERANK_TEMPLATES = {
    "qwen3": RerankTemplate(  # of Qwen3-Reranker
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Given a web search query, retrieve relevant passages that answer the query",
        ("yes", "no"),
    )
}
