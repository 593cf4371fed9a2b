# Writes what PROGRAM completion SHELL prints to OUTPUT, for the build.
execute_process(COMMAND ${PROGRAM} completion ${SHELL} OUTPUT_FILE ${OUTPUT} COMMAND_ERROR_IS_FATAL ANY)
