"""HTTP API of the control plane: routes, authorization, problem details, OpenAPI document."""
