"""Bytes on disk: positioned reads, torch archives, safe unpickling, atomic publishing.

Entry points, from which the other modules are reached:

    remote.folder_reader                     byte ranges of the files of a local or remote folder
    dcp_index.read_index                     `.metadata`: the chunks of arrays, and objects
    tensor_locations.TensorLocations         where the elements of a chunk lie in a file
    safe_pickle.safe_loads, pickling.dumps   pickles as data, read and written without running their code
    archive_writer, safetensors              files that are planned before their tensors are read
    publish, remote.Upload                   a written folder becomes visible, complete
"""
