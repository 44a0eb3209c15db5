class ConfigValidationError(Exception):
    pass
