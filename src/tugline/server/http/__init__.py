"""HTTP API of the control plane: routes, authorization, problem answers, OpenAPI document."""
