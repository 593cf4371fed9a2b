# cmake -DSOURCE_DIR=... -DOUTPUT=FILE -P WriteCommit.cmake: defines UNIEP_COMMIT in FILE as the
# commit of SOURCE_DIR, "+" behind it where tracked files differ; empty outside of a git checkout.
set(commit "")
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE_DIR} describe --always --abbrev=10 --dirty=+
                          --match=no-tag
                  OUTPUT_VARIABLE commit ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
set(text "#pragma once\n\n#define UNIEP_COMMIT \"${commit}\"\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
