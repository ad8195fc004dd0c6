"""What a client is told whose request cannot go on."""

from engine_core.request import Request
from proto.engine_io import EngineCoreOutput, FinishReason
from proto.errors import ErrorInfo


def corrupted_output(request: Request) -> EngineCoreOutput:
    """The final output of a request whose scores were no numbers."""
    return error_output(
        request,
        ErrorInfo(
            "internal", "the model gave scores that are not numbers; this request cannot go on"
        ),
    )


def error_output(request: Request, error: ErrorInfo) -> EngineCoreOutput:
    """The final output of a request; the tokens it had before are sent already."""
    return EngineCoreOutput(
        request.request_id,
        request.choice,
        request.num_output_tokens,
        [],
        FinishReason.ERROR,
        error=error,
    )
