"""What a client is told whose request ended because its scores were no numbers."""

from engine_core.request import Request
from proto.engine_io import EngineCoreOutput, FinishReason
from proto.errors import ErrorInfo


def corrupted_output(request: Request) -> EngineCoreOutput:
    """The final output of the request; the tokens it had before are sent already."""
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error=ErrorInfo(
            "internal", "the model gave scores that are not numbers; this request cannot go on"
        ),
    )
