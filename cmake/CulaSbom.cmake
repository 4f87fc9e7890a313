# SPDX-License-Identifier: Apache-2.0
# cula_sbom(file): writes what a wheel's library contains and loads, as a CycloneDX document for the wheel
# (PEP 770). tools/check_wheel.sh holds it against the library.
include_guard(GLOBAL)

# cula_sbom_component(name version license linkage files...): linkage is how its code comes in: headers,
# static or dynamic; files are those of a dynamic one, as the library names them. Appends to `components` and
# `refs`.
function(cula_sbom_component name version license linkage)
  set(entry "{}")
  foreach(field IN ITEMS "type=library" "bom-ref=${name}" "name=${name}" "version=${version}")
    string(REGEX MATCH "^([a-z-]+)=(.*)$" field "${field}")
    if(NOT CMAKE_MATCH_2 STREQUAL "")
      string(JSON entry SET "${entry}" "${CMAKE_MATCH_1}" "\"${CMAKE_MATCH_2}\"")
    endif()
  endforeach()
  string(JSON entry SET "${entry}" licenses "[{\"expression\": \"${license}\"}]")
  list(JOIN ARGN " " files)
  string(JSON entry SET "${entry}" properties
         "[{\"name\": \"cula:linkage\", \"value\": \"${linkage}\"},
           {\"name\": \"cula:files\", \"value\": \"${files}\"}]")
  string(JSON count LENGTH "${components}")
  string(JSON components SET "${components}" ${count} "${entry}")
  string(JSON refs SET "${refs}" ${count} "\"${name}\"")
  set(components "${components}" PARENT_SCOPE)
  set(refs "${refs}" PARENT_SCOPE)
endfunction()

function(cula_sbom file)
  set(components "[]")
  set(refs "[]")
  set(gcc "GPL-3.0-or-later WITH GCC-exception-3.1")
  cula_sbom_component(pytorch-headers "${torch_version}" BSD-3-Clause headers)
  cula_sbom_component(pytorch "" BSD-3-Clause dynamic libtorch.so libtorch_cpu.so)
  cula_sbom_component(libstdc++ "" "${gcc}" dynamic libstdc++.so.6)
  cula_sbom_component(libgcc "" "${gcc}" dynamic libgcc_s.so.1)
  cula_sbom_component(glibc "" LGPL-2.1-or-later dynamic libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0
                      librt.so.1 ld-linux-x86-64.so.2 ld-linux-aarch64.so.1)
  if(CULA_GLIBC)  # what libstdc++ got later than the one that goes with that glibc
    cula_sbom_component(libstdc++-static "${CMAKE_CXX_COMPILER_VERSION}" "${gcc}" static)
  endif()
  if(CULA_WITH_CUDA)
    cula_sbom_component(cudart_static "${CUDAToolkit_VERSION}" LicenseRef-NVIDIA-CUDA-EULA static)
    cula_sbom_component(cuda-headers "${CUDAToolkit_VERSION}" LicenseRef-NVIDIA-CUDA-EULA headers)
  endif()
  cula_source_commit(commit)
  set(document "{\"bomFormat\": \"CycloneDX\", \"specVersion\": \"1.6\", \"version\": 1}")
  string(JSON document SET "${document}" metadata
         "{\"component\": {\"type\": \"library\", \"bom-ref\": \"cula\", \"name\": \"cula\",
           \"version\": \"${PROJECT_VERSION}\", \"licenses\": [{\"expression\": \"Apache-2.0\"}],
           \"purl\": \"pkg:pypi/cula@${PROJECT_VERSION}\",
           \"properties\": [{\"name\": \"cula:source\", \"value\": \"${commit}\"},
                            {\"name\": \"cula:compiler\",
                             \"value\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\"}]}}")
  string(JSON document SET "${document}" components "${components}")
  string(JSON document SET "${document}" dependencies "[{\"ref\": \"cula\", \"dependsOn\": ${refs}}]")
  file(CONFIGURE OUTPUT "${file}" CONTENT "@document@\n" @ONLY)
endfunction()
