# cmake -DSOURCE_DIR=... -DOUTPUT=FILE -P WriteCommit.cmake: defines UNIEP_COMMIT in FILE as the
# commit of SOURCE_DIR, "+" behind it where tracked files differ; empty where that is no git checkout,
# as within a repository of somebody else, whose commit says nothing of these sources.
set(commit "")
set(top "")
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE_DIR} rev-parse --show-toplevel
                  OUTPUT_VARIABLE top ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
file(REAL_PATH "${SOURCE_DIR}" source_dir)
if(top)
  file(REAL_PATH "${top}" top)
endif()
if(top STREQUAL source_dir)
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
