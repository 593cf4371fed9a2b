# Writes a C++ source that holds the JSON files of profiles/ and tuned/ as strings:
#   cmake -DSOURCE_DIR=... -DOUTPUT=... -P WriteShipped.cmake
function(array_of folder variable function)
  file(GLOB files ${SOURCE_DIR}/${folder}/*.json)
  list(SORT files)
  set(rows "")
  set(count 0)
  foreach(path ${files})
    get_filename_component(name ${path} NAME_WE)
    file(READ ${path} text)
    # Compilers need not accept string literals above 64 KiB, so long ones are put together.
    string(LENGTH "${text}" length)
    set(pieces "")
    foreach(begin RANGE 0 ${length} 8000)
      string(SUBSTRING "${text}" ${begin} 8000 piece)
      string(APPEND pieces "R\"json(${piece})json\"\n")
    endforeach()
    string(APPEND rows "    {\"${name}\",\n${pieces}},\n")
    math(EXPR count "${count} + 1")
  endforeach()
  set(text "std::span<const ShippedFile> ${function}() {\n")
  if(count EQUAL 0)
    string(APPEND text "  return {};\n}\n\n")
  else()
    string(APPEND text "  static constexpr ShippedFile kFiles[] = {\n${rows}  };\n"
                       "  return kFiles;\n}\n\n")
  endif()
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

array_of(profiles profiles shipped_profiles)
array_of(tuned tuned shipped_schedules)
file(WRITE ${OUTPUT} "// Written by cmake/WriteShipped.cmake.
#include \"tune/files/shipped_files.h\"

namespace uniep::tune {

${profiles}${tuned}}  // namespace uniep::tune
")
