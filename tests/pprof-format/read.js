// Prints a pprof file as pprof-format understands it, a line for each sample:
//   VALUE VALUE | LABEL=VALUE ... | FUNCTION FILE:START:LINE < CALLER ...
// and before them a line for the sample types and one for each comment.
'use strict'

const fs = require('fs')
const zlib = require('zlib')
const { Profile } = require('pprof-format')

const bytes = zlib.gunzipSync(fs.readFileSync(process.argv[2]))
const profile = Profile.decode(bytes)
const text = (index) => profile.stringTable.strings[Number(index)]
const byId = (list) => new Map(list.map((item) => [Number(item.id), item]))
const functions = byId(profile.function)
const locations = byId(profile.location)
const mappings = byId(profile.mapping)

const types = profile.sampleType.map((of) => `${text(of.type)}/${text(of.unit)}`)
console.log(`types ${types.join(' ')} period ${profile.period}`)
for (const comment of profile.comment) {
  console.log(`comment ${text(comment)}`)
}
for (const sample of profile.sample) {
  const labels = sample.label.map((label) => {
    const value = Number(label.str) === 0 ? label.num : text(label.str)
    return `${text(label.key)}=${value}`
  })
  const frames = sample.locationId.map((id) => {
    const location = locations.get(Number(id))
    const line = location.line[0]
    const of = functions.get(Number(line.functionId))
    const mapping = text(mappings.get(Number(location.mappingId)).filename)
    return `${text(of.name)} ${text(of.filename)}:${of.startLine}:${line.line} in ${mapping}`
  })
  console.log(`${sample.value.join(' ')} | ${labels.join(' ')} | ${frames.join(' < ')}`)
}
