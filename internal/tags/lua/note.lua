-- Note under its tags what is about to be stored, unless a tag has been invalidated since a load began.
--
-- KEYS  1 book  2.. the index of each tag
-- ARGV  1 the sequence of the book before the load, or '' if no load is to be proved
--       2 a new epoch
--       3 life of the book, ms
--       4.. for each tag: the tag, the number of its keys, and for each of these how long its value lives, ms,
--           and the key
--
-- Returns the epoch of the book, or '' if the note is refused: nothing is noted.
--
-- The book is a hash with the fields
--   e         epoch: random, given at birth
--   n         sequence: it grows with each invalidation, and is at least its time, µs since 1970. So it goes on
--             growing on a server that takes over and lacks the last invalidations.
--   f         the highest n of the marks that have been dropped
--   k         under which epoch and history the indexes are known to be complete
--   t .. tag  until when values may have the tag, ms since 1970
--   m .. tag  mark: n of the last invalidation of the tag, and when to drop it, ms since 1970
-- The index of a tag is a sorted set of keys, by the ends of their values. All times are the server's.

local book, since = KEYS[1], ARGV[1]
redis.call('PTTL', book) -- fails before anything is written if live may not use it
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local tags, at = {}, 4
for i = 2, #KEYS do
  tags[i] = {name = ARGV[at], keys = tonumber(ARGV[at + 1]), first = at + 2}
  at = at + 2 + 2 * tags[i].keys
  -- An index that is gone before its time has been lost: then nothing is known any more.
  local ends = tonumber(redis.call('HGET', book, 't' .. tags[i].name) or 0)
  if ends > now and redis.call('EXISTS', KEYS[i]) == 0 then redis.call('UNLINK', book) end
end

local state = redis.call('HMGET', book, 'e', 'n', 'f')
local epoch, floor = state[1], tonumber(state[3] or 0)
if since ~= '' then
  local known, n = string.match(since, '^(%S+) (%d+)$')
  n = tonumber(n)
  if known ~= epoch or n < floor or n > tonumber(state[2]) then return '' end
  for i = 2, #KEYS do
    local mark = redis.call('HGET', book, 'm' .. tags[i].name)
    if mark and tonumber(string.match(mark, '^%d+')) > n then return '' end
  end
elseif not epoch then
  epoch = ARGV[2]
  redis.call('HSET', book, 'e', epoch, 'n', 0)
  live(book, tonumber(ARGV[3]))
end

local grace = 60000 -- so that an index does not end before the note in the book
local longest = tonumber(ARGV[3])
for i = 2, #KEYS do
  local tag, members, life = tags[i], {}, 0
  for m = 0, tag.keys - 1 do
    local ms = tonumber(ARGV[tag.first + 2 * m])
    life = math.max(life, ms)
    members[2 * m + 1], members[2 * m + 2] = string.format('%.0f', now + ms), ARGV[tag.first + 2 * m + 1]
  end
  local ended = redis.call('ZRANGEBYSCORE', KEYS[i], '-inf', now, 'LIMIT', 0, 2 * tag.keys)
  if #ended > 0 then redis.call('ZREM', KEYS[i], unpack(ended)) end
  -- GT: if two commands store a value at this time, the value with the longer life may be the last.
  redis.call('ZADD', KEYS[i], 'GT', unpack(members))
  live(KEYS[i], life + grace)
  local ends = tonumber(redis.call('HGET', book, 't' .. tag.name) or 0)
  redis.call('HSET', book, 't' .. tag.name, string.format('%.0f', math.max(ends, now + life)))
  longest = math.max(longest, life + grace)
end
live(book, longest)
trim(book, now, floor, #KEYS - 1)
return epoch
