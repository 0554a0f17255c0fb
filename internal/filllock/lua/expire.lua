-- Mark an entry stale, without removing it, and invalidate a running load.
--
-- KEYS  1 value  2 lock
-- ARGV  1 now, as in an entry's header, 8 bytes  2 8 random bytes
--
-- Returns 1 the entry is stale, 0 there is none. Bytes that are not an entry are removed.

local header = redis.pcall('GETRANGE', KEYS[1], 0, 34)
if type(header) == 'table' and not string.find(header.err, 'WRONGTYPE', 1, true) then return header end

local function number(s)
  local n = 0
  for i = 1, #s do n = n * 256 + string.byte(s, i) end
  return n
end

local stale = 0
if type(header) == 'table' or #header < 35 or string.sub(header, 1, 2) ~= '\193\001' then
  redis.call('DEL', KEYS[1])
else
  local flags, fresh = string.byte(header, 3), string.sub(header, 4, 11)
  if flags % 4 < 2 then flags = flags + 2 end
  if number(ARGV[1]) < number(fresh) then fresh = ARGV[1] end -- else it was stale before
  redis.call('SETRANGE', KEYS[1], 2, string.char(flags) .. fresh)
  redis.call('SETRANGE', KEYS[1], 27, ARGV[2]) -- makes it another entry than the known one
  stale = 1
end
if redis.call('DEL', KEYS[2]) == 1 then wake(KEYS[2], '') end
return stale
