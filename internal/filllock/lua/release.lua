-- Release the lock if this attempt still holds it, and leave a note for others if its load brought
-- nothing to store.
--
-- KEYS  1 lock  2 value
-- ARGV  1 token  2 stamp  3 failure, or ''
--       4 how long processes that have a value to serve back off, ms, or 0
--       5 TTL of the note, ms
--       6 '1': remove the value, too
--       7 how long the failure is remembered for processes without a value to serve, ms, or 0
--
-- Returns 1 released, 0 not held by this attempt.

local lock = redis.pcall('GET', KEYS[1])
if type(lock) ~= 'string' or string.sub(lock, 1, 27) ~= 'H' .. ARGV[1] then return 0 end

local ours = 0
if string.sub(lock, 28, 43) == ARGV[2] then ours = 1 end -- else a grant to a late command
if ours == 1 and ARGV[6] == '1' then redis.call('DEL', KEYS[2]) end
if ours == 1 and (ARGV[3] ~= '' or ARGV[4] ~= '0') then
  local time = redis.call('TIME')
  local function after(ms)
    if ms == '0' then return string.rep('0', 16) end
    return string.format('%016.0f', math.min(tonumber(time[1]) * 1000000 + tonumber(time[2]) + tonumber(ms) * 1000, 9e15))
  end
  local failure = ARGV[3]
  if ARGV[7] ~= '0' then failure = 'T' .. after(ARGV[7]) .. failure end
  local left = redis.pcall('SET', KEYS[1], 'F' .. ARGV[1] .. after(ARGV[4]) .. failure, 'PX', ARGV[5])
  if not left.err then
    wake(KEYS[1], '')
    return 1
  end -- else out of memory: release the lock without a note
end
redis.call('DEL', KEYS[1])
wake(KEYS[1], '')
return ours
